#include "reprise/nn/mlp.h"

#include "mlx/ops.h"
#include "reprise/kernels/linear.h"

namespace reprise {

namespace mx = mlx::core;

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), up);
}

mx::array gated(const mx::array& gate, const mx::array& up, GateActivation activation) {
  if (activation == GateActivation::silu) return swiglu(gate, up);
  // gelu by tanh (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415).
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  const mx::array cube = mx::multiply(mx::square(gate), gate);
  const mx::array inner = mx::multiply(number(0.7978845608f), mx::add(gate, mx::multiply(number(0.044715f), cube)));
  const mx::array half = mx::multiply(number(0.5f), gate);
  return mx::multiply(mx::multiply(half, mx::add(number(1.0f), mx::tanh(inner))), up);
}

mx::array GatedMlp::operator()(const mx::array& x) const {
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, {}, {});
}

mx::array GatedMlp::add_to(const mx::array& residual, const RmsNorm& norm, const mx::array& x) const {
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, norm.params(), residual);
}

}  // namespace reprise
