#include "reprise/nn/moe.h"

#include <memory>
#include <utility>

#include "mlx/ops.h"
#include "reprise/nn/mlp.h"

namespace reprise {

namespace mx = mlx::core;

SwitchLinear::SwitchLinear(Weight stacked, std::optional<mx::array> bias)
    : maps_(std::make_shared<const kernels::ExpertMaps>(kernels::ExpertMaps{std::move(stacked), std::move(bias)})) {}

SwitchLinear::SwitchLinear(Weight stacked, std::optional<mx::array> bias, LowRank low_rank)
    : SwitchLinear(std::move(stacked), std::move(bias)) {
  low_rank_ = std::make_shared<const LowRankMaps>(LowRankMaps{
      std::make_shared<const kernels::ExpertMaps>(kernels::ExpertMaps{std::move(low_rank.a)}),
      std::make_shared<const kernels::ExpertMaps>(kernels::ExpertMaps{std::move(low_rank.b)}), low_rank.scale});
}

mx::array SwitchLinear::operator()(const mx::array& x, const mx::array& experts) const {
  const mx::array y = kernels::switch_linear(x, experts, maps_);
  if (low_rank_ == nullptr) return y;
  const mx::array inner = kernels::switch_linear(x, experts, low_rank_->a);
  const mx::array product = kernels::switch_linear(inner, experts, low_rank_->b);
  return mx::add(y, mx::multiply(product, mx::array(low_rank_->scale, y.dtype())));
}

namespace {

kernels::ExpertGlu glu_of(const SwitchGlu& block) {
  return {block.gate_proj.maps(), block.up_proj.maps(), block.down_proj.maps(), block.activation};
}

bool is_adapted(const SwitchGlu& block) {
  return block.gate_proj.is_adapted() || block.up_proj.is_adapted() || block.down_proj.is_adapted();
}

mx::array activated(const mx::array& gate, const mx::array& up, const ExpertActivation& activation) {
  if (const auto* plain = std::get_if<kernels::GateActivation>(&activation)) return gated(gate, up, *plain);
  const auto& clip = std::get<ClippedSwiglu>(activation);
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  const mx::array low = mx::minimum(gate, number(clip.limit));
  const mx::array silu = mx::multiply(low, mx::sigmoid(mx::multiply(number(clip.alpha), low)));
  return mx::multiply(mx::add(mx::clip(up, number(-clip.limit), number(clip.limit)), number(1.0f)), silu);
}

}  // namespace

mx::array SwitchGlu::operator()(const mx::array& x, const Routing& routing) const {
  if (is_adapted(*this)) return combine((*this)(x, routing.experts), routing.weights);
  return kernels::switch_glu(x, routing.experts, glu_of(*this), routing.weights);
}

mx::array SwitchGlu::operator()(const mx::array& x, const mx::array& experts) const {
  if (is_adapted(*this)) {
    return down_proj(activated(gate_proj(x, experts), up_proj(x, experts), activation), experts);
  }
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
