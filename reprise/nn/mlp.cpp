#include "reprise/nn/mlp.h"

#include "mlx/ops.h"

namespace reprise {

namespace mx = mlx::core;

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate)), up);
}

}  // namespace reprise
