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

Routing top_k(const mx::array& scores, int k, NormaliseScores normalise) {
  const mx::array order = mx::argpartition(mx::negative(scores), k - 1, -1);
  mx::Shape stop = order.shape();
  stop.back() = k;
  const mx::array experts = mx::slice(order, mx::Shape(order.ndim(), 0), stop);
  mx::array weights = mx::take_along_axis(scores, experts, -1);
  if (normalise == NormaliseScores::yes) weights = mx::divide(weights, mx::sum(weights, -1, /*keepdims=*/true));
  return {experts, weights};
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
