// Linear maps as one operation each, with what surrounds them in a transformer block: norm before, sum after. On the
// CPU these are our own kernels; on a GPU, and in reference.h, they are made of MLX's operations. Sums are in float32
// (many quantised rows: exact integer products per group, see docs/performance.md). Inputs are not changed. Weights
// must be evaluated; those that are not are evaluated here.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/weight.h"

namespace reprise::kernels {

// y = x / sqrt(mean(x²) + eps) · weight over the last axis.
struct RmsNormParams {
  mlx::core::array weight;  // [E]
  float eps;
};

// y_i = norm(x) · W_iᵀ + b_i: maps of one input, which is read once. x [..., in]. Returns: [..., out_i] each, in x's
// dtype. Throws: invalid_argument for maps that do not take x's last axis, or weights that are not well formed.
std::vector<mlx::core::array> linear(const mlx::core::array& x, const std::vector<AffineMapPtr>& maps,
                                     const std::optional<RmsNormParams>& norm = {});

// residual + norm(x · Wᵀ + b). Shapes [..., in] and [..., out]. Returns: the residual's shape, x's dtype. Throws: as
// above.
mlx::core::array linear_add(const mlx::core::array& x, const AffineMapPtr& map, const mlx::core::array& residual,
                            const std::optional<RmsNormParams>& output_norm = {});

// What a gated feed-forward block does to its gate.
enum class GateActivation { silu, gelu_tanh };

// (residual +) output_norm(down(act(gate(norm(x))) · up(norm(x)))): the gated feed-forward block as one operation. x
// [..., E] →
// [..., E] in x's dtype. Throws: as above.
mlx::core::array gated_mlp(const mlx::core::array& x, const AffineMapPtr& gate, const AffineMapPtr& up,
                           const AffineMapPtr& down, GateActivation activation,
                           const std::optional<RmsNormParams>& norm, const std::optional<mlx::core::array>& residual,
                           const std::optional<RmsNormParams>& output_norm = {});

// norm(x), alone. x [..., E].
mlx::core::array rms_norm(const mlx::core::array& x, const RmsNormParams& norm);

// Rows `ids` (integers, any shape) of a weight [V, E], unpacked → [..., E] in `dtype`. Throws: invalid_argument for ids
// of another dtype. Ids outside [0, V): a std::runtime_error at evaluation on the CPU, undefined on a GPU.
mlx::core::array embedding(const mlx::core::array& ids, const Weight& weight, mlx::core::Dtype dtype);

}  // namespace reprise::kernels
