// Attention over stored keys and values by pointers and sizes, no MLX: what every attention operation on the CPU runs.
// Private to `kernels`. Two ways inside: few queries read the stored rows once for all heads of a group (decode), many
// queries go block by block with a running softmax (prefill). Sums are float32. Results do not depend on the number of
// threads, nor on what else is in the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

// Keys or values [B, Hkv, S, size] as they are stored; the last axis is contiguous, the others are strided. Or, for a
// batch of one, in pages: column c is column c % kPageColumns of page c / kPageColumns.
struct StoredRows {
  int size = 0;                    // features of a row, unpacked: D or Dv
  int bits = 0;                    // 0: dense
  int group_size = 0;              // divides size
  Element element = Element::f32;  // of dense rows, or of scales and biases
  const void* data = nullptr;      // dense elements, or uint32 words of a row: size * bits / 32
  const void* scales = nullptr;    // size / group_size for a row
  const void* biases = nullptr;
  // In elements (dense elements or words).
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t column_stride = 0;
  // Of scales and biases alike, in elements.
  std::ptrdiff_t group_batch_stride = 0;
  std::ptrdiff_t group_head_stride = 0;
  std::ptrdiff_t group_column_stride = 0;
  // None: data, scales and biases are those of all columns. Else they are null, and each page has its own, so many
  // bytes after its beginning.
  std::span<const std::byte* const> pages = {};
  std::size_t data_at = 0;
  std::size_t scales_at = 0;
  std::size_t biases_at = 0;
};

// Where a column lies: column `column` of data, scales and biases.
struct ColumnPlace {
  const void* data = nullptr;
  const void* scales = nullptr;
  const void* biases = nullptr;
  int column = 0;
};

inline ColumnPlace place_of(const StoredRows& rows, int column) {
  if (rows.pages.empty()) return {rows.data, rows.scales, rows.biases, column};
  const std::byte* page = rows.pages[static_cast<std::size_t>(column / kPageColumns)];
  return {page + rows.data_at, page + rows.scales_at, page + rows.biases_at, column % kPageColumns};
}

// A float32 array [B, H, L, features] whose last axis is contiguous; strides in floats.
template <typename T>
struct HeadRows {
  T* data = nullptr;
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t row_stride = 0;
};

enum class MaskKind : std::uint8_t { none, boolean, additive };

// Over [B, H, L, S], strides in elements (0 where it is broadcast).
struct MaskView {
  MaskKind kind = MaskKind::none;
  Element element = Element::f32;  // of an additive mask; a boolean one is a byte each, nonzero: may attend
  const void* data = nullptr;
  std::ptrdiff_t batch_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t column_stride = 0;
};

struct AttentionArgs {
  int batch = 0;        // B
  int heads = 0;        // H, a multiple of kv_heads
  int kv_heads = 0;     // Hkv
  int num_queries = 0;  // L
  int columns = 0;      // S: columns 0 to S - 1 of keys and values are visible
  float scale = 1.0f;
  HeadRows<const float> queries;
  StoredRows keys;
  StoredRows values;
  HeadRows<float> output;

  bool causal = false;  // query i sees columns up to S - L + i
  int window = 0;       // with causal, if not 0: of those it sees the last `window` ones
  MaskView mask;        // on top of causal; a row in which all is masked gives the mean of the values
  const std::int32_t* row_starts = nullptr;  // [B] or none: columns before it are neither seen nor read
  const float* sinks = nullptr;              // [H] or none: an extra logit in the softmax's denominator
  float softcap = 0.0f;                      // if not 0, scores become softcap · tanh(score / softcap) before masks

  // With causal, if not 0: a query sees only its own chunk of so many positions, of which column 0 is at `position`.
  int chunk = 0;
  int position = 0;
};

// A query that no column is left for (by row_starts or causal) gives zeros. Throws: bad_alloc.
// Several are worked on at once, and the result of each is bit for bit its own.
void attend(std::span<const AttentionArgs> several, ThreadPool& pool);
void attend(const AttentionArgs& args, ThreadPool& pool);

}  // namespace reprise::kernels::cpu
