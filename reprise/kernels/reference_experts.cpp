#include <variant>

#include "mlx/ops.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

mx::array gated(const mx::array& gate, const mx::array& up, GateActivation activation) {
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  if (activation == GateActivation::silu) return mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), up);
  const auto cubic = mx::multiply(number(0.044715f), mx::multiply(gate, mx::square(gate)));
  const auto inner = mx::tanh(mx::multiply(number(0.7978845608f), mx::add(gate, cubic)));
  return mx::multiply(mx::multiply(mx::multiply(number(0.5f), gate), mx::add(number(1.0f), inner)), up);
}

mx::array gated(const mx::array& gate, const mx::array& up, const ClippedSwiglu& clip) {
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  const mx::array low = mx::minimum(gate, number(clip.limit));
  const mx::array silu = mx::multiply(low, mx::sigmoid(mx::multiply(number(clip.alpha), low)));
  return mx::multiply(mx::add(mx::clip(up, number(-clip.limit), number(clip.limit)), number(1.0f)), silu);
}

}  // namespace

mx::array switch_linear(const mx::array& x, const mx::array& experts, const ExpertMapsPtr& map) {
  // One row a product: [..., 1 or k, 1, in].
  mx::array rows = mx::expand_dims(x, -2);
  if (x.ndim() < experts.ndim() + 1) rows = mx::expand_dims(rows, -2);
  mx::array out = [&] {
    if (const auto* dense = std::get_if<DenseWeight>(&map->weight)) {
      return mx::gather_mm(rows, mx::astype(mx::swapaxes(*dense, -1, -2), x.dtype()), std::nullopt, experts);
    }
    if (const auto* m = std::get_if<MicroscaledWeight>(&map->weight)) {
      return mx::gather_qmm(rows, m->packed, m->scales, std::nullopt, std::nullopt, experts, /*transpose=*/true,
                            group_size_of(m->format), bits_of(m->format), name_of(m->format));
    }
    const auto& q = std::get<QuantizedWeight>(map->weight);
    return mx::gather_qmm(rows, q.packed, mx::astype(q.scales, x.dtype()), mx::astype(q.biases, x.dtype()),
                          std::nullopt, experts, /*transpose=*/true, q.group_size, q.bits);
  }();
  out = mx::squeeze(out, -2);
  return map->bias ? mx::add(out, mx::astype(mx::take(*map->bias, experts, 0), out.dtype())) : out;
}

mx::array switch_glu(const mx::array& x, const mx::array& experts, const ExpertGlu& glu,
                     const std::optional<mx::array>& weights) {
  const mx::array gate = reference::switch_linear(x, experts, glu.gate);
  const mx::array up = reference::switch_linear(x, experts, glu.up);
  const mx::array hidden = std::visit([&](const auto& how) { return gated(gate, up, how); }, glu.activation);
  const mx::array out = reference::switch_linear(hidden, experts, glu.down);
  if (!weights) return out;
  return mx::sum(mx::multiply(out, mx::astype(mx::expand_dims(*weights, -1), out.dtype())), -2);
}

}  // namespace reprise::kernels::reference
