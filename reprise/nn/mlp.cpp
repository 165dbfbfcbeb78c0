#include "reprise/nn/mlp.h"

#include "mlx/ops.h"
#include "reprise/kernels/linear.h"

namespace reprise {

namespace mx = mlx::core;

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), up);
}

mx::array GatedMlp::operator()(const mx::array& x) const {
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), kernels::GateActivation::silu, {}, {});
}

mx::array GatedMlp::add_to(const mx::array& residual, const RmsNorm& norm, const mx::array& x) const {
  return kernels::gated_mlp(x, gate_proj.map(), up_proj.map(), down_proj.map(), kernels::GateActivation::silu,
                            norm.params(), residual);
}

}  // namespace reprise
