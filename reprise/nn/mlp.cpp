#include "reprise/nn/mlp.h"

#include "mlx/ops.h"
#include "reprise/kernels/linear.h"

namespace reprise {

namespace mx = mlx::core;

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), up);
}

mx::array gated(const mx::array& gate, const mx::array& up, GateActivation activation) {
  return activation == GateActivation::silu ? swiglu(gate, up) : mx::multiply(gelu_tanh(gate), up);
}

mx::array gelu(const mx::array& x) {
  const auto number = [&](float value) { return mx::array(value, x.dtype()); };
  const mx::array twice = mx::add(number(1.0f), mx::erf(mx::multiply(x, number(0.7071067812f))));
  return mx::multiply(mx::multiply(number(0.5f), x), twice);
}

mx::array gelu_tanh(const mx::array& x) {
  const auto number = [&](float value) { return mx::array(value, x.dtype()); };
  const mx::array cube = mx::multiply(mx::square(x), x);
  const mx::array inner = mx::multiply(number(0.7978845608f), mx::add(x, mx::multiply(number(0.044715f), cube)));
  return mx::multiply(mx::multiply(number(0.5f), x), mx::add(number(1.0f), mx::tanh(inner)));
}

namespace {

bool is_adapted(const GatedMlp& mlp) {
  return mlp.gate_proj.is_adapted() || mlp.up_proj.is_adapted() || mlp.down_proj.is_adapted();
}

}  // namespace

mx::array GatedMlp::operator()(const mx::array& x) const {
  if (is_adapted(*this)) {
    const auto projected = project(x, {gate_proj, up_proj});
    return down_proj(gated(projected[0], projected[1], activation));
  }
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, {}, {});
}

mx::array GatedMlp::add_to(const mx::array& residual, const mx::array& x) const {
  if (is_adapted(*this)) return mx::add(residual, (*this)(x));
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, {}, residual);
}

mx::array GatedMlp::add_to(const mx::array& residual, const RmsNorm& norm, const mx::array& x) const {
  if (is_adapted(*this)) return mx::add(residual, (*this)(norm(x)));
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, norm.params(), residual);
}

mx::array GatedMlp::add_normed_to(const mx::array& residual, const RmsNorm& norm, const mx::array& x,
                                  const RmsNorm& output_norm) const {
  if (is_adapted(*this)) return mx::add(residual, output_norm((*this)(norm(x))));
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), activation, norm.params(), residual,
                            output_norm.params());
}

}  // namespace reprise
