// Matrix products of a few or many float32 rows with a weight matrix: the inner loops under every linear operation.
// Pointers and sizes, no MLX. Private to `kernels`. Two steps, so that several maps of one input share the first:
//   prepare   brings input rows into the form that the product wants (quantised weights: int16 per row and group, with
//             the groups' scales and sums; dense weights: as they are);
//   multiply  a range of output columns, from any thread.
#pragma once

#include <cstddef>

#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

// How input rows must be prepared: weights with equal forms share prepared rows.
struct InputForm {
  int cols = 0;
  int bits = 0;  // 0: dense
  int group_size = 0;
  bool few_rows = true;  // which of the two families of products takes them
  bool operator==(const InputForm&) const = default;
};

InputForm input_form(const WeightView& weight, int num_rows);

// Bytes of prepared rows, a multiple of 64. The memory must be aligned to 64 bytes.
std::size_t prepared_bytes(const InputForm& form, int num_rows);

// Rows [begin, end) of x [num_rows, cols] (row stride ldx floats), from any thread; rows are independent only in blocks
// of kPrepareBlock, so ranges begin and end at multiples of it (or at num_rows).
inline constexpr int kPrepareBlock = 16;
void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared);

// Output columns are handed out in multiples of this.
inline constexpr int kColumnBlock = 32;

// out[m * ldo + (n - begin)] = Σ_k x[m, k] · w[n, k] for m in [0, num_rows), n in [begin, end). Requires: rows prepared
// with this weight's form and num_rows; begin a multiple of kColumnBlock, end too or weight.rows. Any thread.
void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo);

// Output columns that one task should take, so that tasks are even and worth handing out.
int columns_per_task(const WeightView& weight, int num_rows, int threads);

// Row `row` of the weight, unpacked: out [cols].
void unpack_row(const WeightView& weight, int row, float* out);

}  // namespace reprise::kernels::cpu
