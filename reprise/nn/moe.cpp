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
    const auto& q = std::get<QuantizedWeight>(weight_);
    return mx::gather_qmm(rows, q.packed, mx::astype(q.scales, x.dtype()), mx::astype(q.biases, x.dtype()),
                          std::nullopt, experts, /*transpose=*/true, q.group_size, q.bits);
  }();
  out = mx::squeeze(out, -2);
  return bias_ ? mx::add(out, mx::take(*bias_, experts, 0)) : out;
}

mx::array SwitchGlu::operator()(const mx::array& x, const mx::array& experts) const {
  const mx::array gate = gate_proj(x, experts);
  const mx::array up = up_proj(x, experts);
  return down_proj(gated(gate, up, activation), experts);
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

mx::array combine(const mx::array& outputs, const mx::array& weights) {
  return mx::sum(mx::multiply(outputs, mx::astype(mx::expand_dims(weights, -1), outputs.dtype())), -2);
}

}  // namespace reprise
