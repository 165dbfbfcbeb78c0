#include "reprise/nn/moe.h"

#include <memory>
#include <utility>

#include "mlx/ops.h"

namespace reprise {

namespace mx = mlx::core;

SwitchLinear::SwitchLinear(Weight stacked, std::optional<mx::array> bias)
    : maps_(std::make_shared<const kernels::ExpertMaps>(kernels::ExpertMaps{std::move(stacked), std::move(bias)})) {}

mx::array SwitchLinear::operator()(const mx::array& x, const mx::array& experts) const {
  return kernels::switch_linear(x, experts, maps_);
}

namespace {

kernels::ExpertGlu glu_of(const SwitchGlu& block) {
  return {block.gate_proj.maps(), block.up_proj.maps(), block.down_proj.maps(), block.activation};
}

}  // namespace

mx::array SwitchGlu::operator()(const mx::array& x, const Routing& routing) const {
  return kernels::switch_glu(x, routing.experts, glu_of(*this), routing.weights);
}

mx::array SwitchGlu::operator()(const mx::array& x, const mx::array& experts) const {
  return kernels::switch_glu(x, experts, glu_of(*this));
}

Routing top_k(const mx::array& scores, int k, NormaliseScores normalise) { return top_k(scores, scores, k, normalise); }

Routing top_k(const mx::array& scores, const mx::array& order, int k, NormaliseScores normalise) {
  const mx::array best = mx::argpartition(mx::negative(order), k - 1, -1);
  mx::Shape stop = best.shape();
  stop.back() = k;
  const mx::array experts = mx::slice(best, mx::Shape(best.ndim(), 0), stop);
  mx::array weights = mx::take_along_axis(scores, experts, -1);
  if (normalise == NormaliseScores::yes) weights = mx::divide(weights, mx::sum(weights, -1, /*keepdims=*/true));
  return {experts, weights};
}

mx::array limit_to_groups(const mx::array& scores, const GroupLimit& limit) {
  const mx::array grouped = mx::unflatten(scores, -1, {limit.groups, scores.shape(-1) / limit.groups});
  const mx::array worth = mx::sum(mx::topk(grouped, limit.members, -1), -1);
  const mx::array rank = mx::argsort(mx::argsort(mx::negative(worth), -1), -1);
  const mx::array is_kept = mx::less(rank, mx::array(limit.kept, rank.dtype()));
  return mx::flatten(mx::where(mx::expand_dims(is_kept, -1), grouped, mx::array(0.0f, scores.dtype())), -2, -1);
}

Routing top_k_of_softmax(const mx::array& logits, int k, NormaliseScores normalise) {
  return top_k(mx::softmax(logits, -1, /*precise=*/true), k, normalise);
}

Routing softmax_of_top_k(const mx::array& logits, int k) {
  Routing routing = top_k(logits, k, NormaliseScores::no);
  routing.weights = mx::softmax(routing.weights, -1, /*precise=*/true);
  return routing;
}

mx::array combine(const mx::array& outputs, const mx::array& weights) {
  return mx::sum(mx::multiply(outputs, mx::astype(mx::expand_dims(weights, -1), outputs.dtype())), -2);
}

}  // namespace reprise
