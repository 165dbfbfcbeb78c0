// Affine maps of which each row takes its own: mixtures of experts. On the CPU our own products run for each expert
// over the rows that chose it; on a GPU, and in reference.h, they are made of MLX's gathering products. Sums are in
// float32. Inputs are not changed. Weights must be evaluated; those that are not are evaluated here.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <memory>
#include <optional>
#include <variant>

#include "mlx/array.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/weight.h"

namespace reprise::kernels {

// As many affine maps as there are experts. Immutable.
struct ExpertMaps {
  Weight weight;                              // arrays as of one map, with an axis of experts in front
  std::optional<mlx::core::array> bias = {};  // [experts, out]

  int experts() const;
  int in() const { return inputs_of(weight); }
  int out() const { return outputs_of(weight); }
};
using ExpertMapsPtr = std::shared_ptr<const ExpertMaps>;

// (clip(up, ±limit) + 1) · g · sigmoid(alpha · g) with g = min(gate, limit): what gpt-oss does to its gate.
struct ClippedSwiglu {
  float alpha = 1.702f;
  float limit = 7.0f;
};
using ExpertActivation = std::variant<GateActivation, ClippedSwiglu>;

// y[..., j, :] = W[e] · x + b[e] with e = experts[..., j]. experts: integers [..., k]; x [..., in], one for all of a
// token's experts, or [..., k, in]. Returns: [..., k, out] in x's dtype. Throws: invalid_argument for shapes that do
// not fit, or weights that are not well formed. Ids that name no expert: a std::runtime_error at evaluation on the CPU,
// undefined on a GPU.
mlx::core::array switch_linear(const mlx::core::array& x, const mlx::core::array& experts, const ExpertMapsPtr& map);

// A gated feed-forward block per expert, down(act(gate(x)) · up(x)), as one operation.
struct ExpertGlu {
  ExpertMapsPtr gate;
  ExpertMapsPtr up;
  ExpertMapsPtr down;
  ExpertActivation activation = GateActivation::silu;
};
// x [..., E], experts [..., k] → [..., k, E]; or, with weights [..., k], their sum Σ_k weights · outputs → [..., E].
// In x's dtype. Throws: as above.
mlx::core::array switch_glu(const mlx::core::array& x, const mlx::core::array& experts, const ExpertGlu& glu,
                            const std::optional<mlx::core::array>& weights = {});

}  // namespace reprise::kernels
