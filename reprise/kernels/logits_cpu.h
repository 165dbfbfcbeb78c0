// Passes over one row of logits. Pointers and sizes, no MLX. Private to `kernels`. Results are the same for every
// number of threads; they may differ in the last bit between instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reprise::kernels::cpu {

// A row is summed in pieces of this length, whoever does them.
inline constexpr int kPieceLength = 8192;

// Of one piece: sum = Σ exp(x - max). `sum` is not a number when the piece holds a NaN or +infinity; 0 when it holds
// nothing but -infinity.
struct PieceSummary {
  float max;
  int argmax;  // the first; counted from the piece's begin
  double sum;
};
PieceSummary summarize_piece(const float* x, int n);

// Of a row: log(Σ exp(x)); not a number as select.h says.
struct RowSummary {
  float max;
  int argmax;
  float log_sum;
};
RowSummary join(const PieceSummary* pieces, int num_pieces);

// out = x - y.
void subtract(const float* x, int n, float y, float* out);

// Σ exp((x - max) · factor), and each of them.
double sum_of_powers(const float* x, int n, float max, float factor);
void powers(const float* x, int n, float max, float factor, float* out);

// The entries of a row that are at least `least`, in order. Requires: values and ids have room for n and a vector more
// (kGatherSlack). Returns: how many.
inline constexpr int kGatherSlack = 64;
int gather_at_least(const float* x, int n, float least, float* values, std::int32_t* ids);

}  // namespace reprise::kernels::cpu
