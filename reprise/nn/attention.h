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
  // int32 [B]: columns before row_starts[b] hold nothing of row b; they are not read. The mask must hide them as well.
  std::optional<mlx::core::array> row_starts = {};
  // c: scaled scores become c · tanh(score / c) before they are masked (Gemma 2, https://arxiv.org/abs/2408.00118).
  std::optional<float> softcap = {};
};

// softmax(cap(scale · q · Kᵀ) + mask) · V with grouped heads (H a multiple of Hkv), over dense or quantised keys and
// values. queries [B, H, L, D]. Returns: [B, H, L, Dv] in the queries' dtype; a fully masked row is finite. Inputs stay
// as they are. Throws: invalid_argument for shapes that do not fit, a soft cap that is not positive, or a quantisation
// that MLX does not know.
mlx::core::array scaled_dot_product_attention(const mlx::core::array& queries, const KeysValues& keys_values,
                                              const AttentionScoreOptions& options);

}  // namespace reprise
