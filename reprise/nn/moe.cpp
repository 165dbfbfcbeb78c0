#include "reprise/nn/moe.h"

#include <utility>
#include <variant>

#include "mlx/ops.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"
#include "reprise/nn/mlp.h"

namespace reprise {

namespace mx = mlx::core;

SwitchLinear::SwitchLinear(Weight stacked, std::optional<mx::array> bias)
    : weight_(std::move(stacked)), bias_(std::move(bias)) {}

mx::array SwitchLinear::operator()(const mx::array& x, const mx::array& experts) const {
  // One row a product: [..., 1 or k, 1, in].
  mx::array rows = mx::expand_dims(x, -2);
  if (x.ndim() < experts.ndim() + 1) rows = mx::expand_dims(rows, -2);
  mx::array out = [&] {
    if (const auto* dense = std::get_if<DenseWeight>(&weight_)) {
      return mx::gather_mm(rows, mx::astype(mx::swapaxes(*dense, -1, -2), x.dtype()), std::nullopt, experts);
    }
    if (const auto* m = std::get_if<MicroscaledWeight>(&weight_)) {
      return mx::gather_qmm(rows, m->packed, m->scales, std::nullopt, std::nullopt, experts, /*transpose=*/true,
                            group_size_of(m->format), bits_of(m->format), name_of(m->format));
    }
    const auto& q = std::get<QuantizedWeight>(weight_);
    return mx::gather_qmm(rows, q.packed, mx::astype(q.scales, x.dtype()), mx::astype(q.biases, x.dtype()),
                          std::nullopt, experts, /*transpose=*/true, q.group_size, q.bits);
  }();
  out = mx::squeeze(out, -2);
  return bias_ ? mx::add(out, mx::astype(mx::take(*bias_, experts, 0), out.dtype())) : out;
}

namespace {

mx::array gated(const mx::array& gate, const mx::array& up, const ClippedSwiglu& clip) {
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  const mx::array low = mx::minimum(gate, number(clip.limit));
  const mx::array silu = mx::multiply(low, mx::sigmoid(mx::multiply(number(clip.alpha), low)));
  return mx::multiply(mx::add(mx::clip(up, number(-clip.limit), number(clip.limit)), number(1.0f)), silu);
}

}  // namespace

mx::array SwitchGlu::operator()(const mx::array& x, const mx::array& experts) const {
  const mx::array gate = gate_proj(x, experts);
  const mx::array up = up_proj(x, experts);
  return down_proj(std::visit([&](const auto& how) { return gated(gate, up, how); }, activation), experts);
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
