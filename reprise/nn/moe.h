// Mixtures of experts: per-token choice among stacked weights (Shazeer et al., https://arxiv.org/abs/1701.06538).
// Threads: immutable after construction; results are unevaluated arrays of the calling thread.
#pragma once

#include <memory>
#include <optional>

#include "mlx/array.h"
#include "reprise/kernels/experts.h"
#include "reprise/kernels/weight.h"

namespace reprise {

using kernels::ClippedSwiglu;
using kernels::ExpertActivation;

// As many affine maps as there are experts.
class SwitchLinear {
 public:
  // Arrays as of one map with an axis of experts in front: dense [experts, out, in]. bias [experts, out].
  explicit SwitchLinear(Weight stacked, std::optional<mlx::core::array> bias = {});
  // Added to each expert's map: scale · (x aᵀ) bᵀ with a [experts, rank, in], b [experts, out, rank].
  struct LowRank {
    mlx::core::array a;
    mlx::core::array b;
    float scale = 1.0f;
  };
  SwitchLinear(Weight stacked, std::optional<mlx::core::array> bias, LowRank low_rank);

  // x [..., in] for all of a token's experts, or [..., k, in] for each; experts: integers [..., k] → [..., k, out].
  mlx::core::array operator()(const mlx::core::array& x, const mlx::core::array& experts) const;

  // All of it, unless is_adapted().
  const kernels::ExpertMapsPtr& maps() const { return maps_; }
  bool is_adapted() const { return low_rank_ != nullptr; }

 private:
  struct LowRankMaps {
    kernels::ExpertMapsPtr a;
    kernels::ExpertMapsPtr b;
    float scale;
  };

  kernels::ExpertMapsPtr maps_;
  std::shared_ptr<const LowRankMaps> low_rank_;  // null: none
};

struct Routing {
  mlx::core::array experts;  // uint32 [..., k]
  mlx::core::array weights;  // [..., k]
};

// A gated feed-forward block per expert.
struct SwitchGlu {
  SwitchLinear gate_proj;
  SwitchLinear up_proj;
  SwitchLinear down_proj;
  ExpertActivation activation = kernels::GateActivation::silu;

  // x [..., E] → [..., E]: the weighted sum of what each of a token's experts says.
  mlx::core::array operator()(const mlx::core::array& x, const Routing& routing) const;
  // x [..., E], experts [..., k] → [..., k, E]: what each of a token's experts says.
  mlx::core::array operator()(const mlx::core::array& x, const mlx::core::array& experts) const;
};

// The k experts of the highest scores [..., experts], and these scores; divided by their sum if `normalise`.
enum class NormaliseScores { no, yes };
Routing top_k(const mlx::core::array& scores, int k, NormaliseScores normalise);
// The k experts that are highest in `order`, which has the scores' shape; the weights are their scores.
Routing top_k(const mlx::core::array& scores, const mlx::core::array& order, int k, NormaliseScores normalise);

// Experts lie in groups of equal size, one after the other, and a token's come from the best groups alone
// (DeepSeek-AI, https://arxiv.org/abs/2405.04434).
struct GroupLimit {
  int groups;
  int kept;     // best groups
  int members;  // a group is as good as the sum of so many of its best members
};
// The scores [..., experts], those outside of the best groups 0. Requires: groups divide the experts, members ≤ a
// group's, kept ≤ groups.
mlx::core::array limit_to_groups(const mlx::core::array& scores, const GroupLimit& limit);

// The softmax over the experts' logits [..., experts] and then its k highest; or over the k highest logits alone.
// Softmaxes are in float32 inside. Weights in the logits' dtype.
Routing top_k_of_softmax(const mlx::core::array& logits, int k, NormaliseScores normalise);
Routing softmax_of_top_k(const mlx::core::array& logits, int k);

// Σ_k weights · outputs. outputs [..., k, E], weights [..., k] → [..., E] in the outputs' dtype.
mlx::core::array combine(const mlx::core::array& outputs, const mlx::core::array& weights);

}  // namespace reprise
