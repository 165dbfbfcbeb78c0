// Scaled dot-product attention over whatever a cache stores.
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

struct AttentionScoreOptions {
  float scale = 1.0f;  // multiplies the scores; usually D^-1/2
  Mask mask = NoMask{};
  std::optional<mlx::core::array> sinks = {};  // [H]: an extra logit per head in the softmax's denominator
  // Many queries on quantised keys and values on the CPU: may these be unpacked, for the time of a product? That is
  // faster where MLX's float product is (with OpenBLAS, twice); no result depends on it but by rounding. MLX's wheel in
  // a process that links no other BLAS first, such as Python's, has a slow one.
  bool may_unpack = true;
};

// softmax(scale · q · Kᵀ + mask) · V with grouped heads (H a multiple of Hkv), over dense or quantised keys and values.
// queries [B, H, L, D]. Returns: [B, H, L, Dv] in the queries' dtype; a fully masked row is finite. Inputs stay as they
// are. Throws: invalid_argument for shapes that do not fit, or a quantisation that MLX does not know.
mlx::core::array scaled_dot_product_attention(const mlx::core::array& queries, const KeysValues& keys_values,
                                              const AttentionScoreOptions& options);

}  // namespace reprise
