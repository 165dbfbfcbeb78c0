// Mixtures of experts: per-token choice among stacked weights (Shazeer et al., https://arxiv.org/abs/1701.06538).
// Threads: immutable after construction; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/weight.h"

namespace reprise {

// As many affine maps as there are experts.
class SwitchLinear {
 public:
  // Arrays as of one map with an axis of experts in front: dense [experts, out, in]. bias [experts, out].
  explicit SwitchLinear(Weight stacked, std::optional<mlx::core::array> bias = {});

  // x [..., in] for all of a token's experts, or [..., k, in] for each; experts: integers [..., k] → [..., k, out].
  mlx::core::array operator()(const mlx::core::array& x, const mlx::core::array& experts) const;

 private:
  Weight weight_;
  std::optional<mlx::core::array> bias_;
};

// A gated feed-forward block per expert.
struct SwitchGlu {
  SwitchLinear gate_proj;
  SwitchLinear up_proj;
  SwitchLinear down_proj;
  kernels::GateActivation activation = kernels::GateActivation::silu;

  // x [..., E], experts [..., k] → [..., k, E]: what each of a token's experts says.
  mlx::core::array operator()(const mlx::core::array& x, const mlx::core::array& experts) const;
};

struct Routing {
  mlx::core::array experts;  // uint32 [..., k]
  mlx::core::array weights;  // [..., k]
};

// The k experts of the highest scores [..., experts], and these scores; divided by their sum if `normalise`.
enum class NormaliseScores { no, yes };
Routing top_k(const mlx::core::array& scores, int k, NormaliseScores normalise);

// Σ_k weights · outputs. outputs [..., k, E], weights [..., k] → [..., E] in the outputs' dtype.
mlx::core::array combine(const mlx::core::array& outputs, const mlx::core::array& weights);

}  // namespace reprise
