// Attention straight over the stored keys and values, and attention that also rotates and stores the new ones: one
// operation for all that a cache does in a step. CPU kernels; on a GPU, and in reference.h, made of MLX's operations.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/kernels/keys_values.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/rope.h"

namespace reprise::kernels {

struct AttentionParams {
  float scale = 1.0f;
  Mask mask = NoMask{};
  std::optional<mlx::core::array> sinks = {};  // [H]: an extra logit per head in the softmax's denominator
  // int32 [B]: columns before row_starts[b] hold nothing of row b; they are neither read nor paid for. The mask must
  // hide them as well.
  std::optional<mlx::core::array> row_starts = {};
  std::optional<float> softcap = {};  // c > 0: scores become c · tanh(score / c) before they are masked
};

// softmax(cap(scale · q · Kᵀ) + mask) · V with grouped heads (H a multiple of Hkv). queries [B, H, L, D], float32,
// float16 or bfloat16; keys and values of any floating dtype or quantised. Returns: [B, H, L, Dv] in the queries'
// dtype; a fully masked row is finite. Sums are float32. Requires: shapes that fit (nn checks them).
mlx::core::array attention(const mlx::core::array& queries, const KeysValues& keys_values,
                           const AttentionParams& params);

// Where the L new rows go: columns at … at + L - 1 of buffers that attention then sees from column 0 to `visible` - 1.
// `tensors`: [keys, values] [B, Hkv, columns, D], or [packed, scales, biases] of keys, then of values. They are written
// in place when nobody else holds them (move them in), else copied first, as MLX's slice_update does.
struct StoreTarget {
  std::vector<mlx::core::array> tensors;  // none: there is no buffer yet, at is 0
  std::optional<KVQuantization> quantization;
  int at = 0;
  int visible = 0;  // ≥ at + L, unless a ring has wrapped
  // Columns that the buffers shall have, if more than they have: of the old ones the first `at` stay, the others are 0.
  int capacity = 0;
  // Of buffers that are not there yet (quantised: of scales and biases). None: the keys' and values' own.
  std::optional<mlx::core::Dtype> dtype = {};
};

struct StoreAndAttendResult {
  mlx::core::array output;                // [B, L, H * Dv] in the queries' dtype
  std::vector<mlx::core::array> tensors;  // the buffers with the new rows
};

// Norms of each head's query and key, before they are rotated. Weights [D].
struct HeadNorms {
  std::optional<RmsNormParams> queries = {};
  std::optional<RmsNormParams> keys = {};
};

// Norms and rotates queries and keys at `offset` (rope: none, they come rotated), stores keys and values in the
// buffers' dtype (float16: its largest number for what is beyond it; quantised: bit for bit what mx::quantize makes of
// the rotated rows in the scales' dtype), attends over columns [0, visible). Shapes as linear layers give them: queries
// [B, L, H * D], keys [B, L, Hkv * D], values [B, L, Hkv * Dv]. A Causal mask lets query i see columns up to visible -
// L + i. Requires: shapes and dtypes that fit.
StoreAndAttendResult store_and_attend(const mlx::core::array& queries, const mlx::core::array& keys,
                                      const mlx::core::array& values, int heads, const RopeParams* rope,
                                      const Offset& offset, StoreTarget target, const AttentionParams& params,
                                      const HeadNorms& norms = {});

}  // namespace reprise::kernels
