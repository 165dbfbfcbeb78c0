#include "reprise/kernels/linear.h"

#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace mx = mlx::core;

std::vector<mx::array> linear(const mx::array& x, const std::vector<AffineMapPtr>& maps,
                              const std::optional<RmsNormParams>& norm) {
  return reference::linear(x, maps, norm);
}

mx::array linear_add(const mx::array& x, const AffineMapPtr& map, const mx::array& residual) {
  return reference::linear_add(x, map, residual);
}

mx::array gated_mlp(const mx::array& x, const AffineMapPtr& gate, const AffineMapPtr& up, const AffineMapPtr& down,
                    GateActivation activation, const std::optional<RmsNormParams>& norm,
                    const std::optional<mx::array>& residual) {
  return reference::gated_mlp(x, gate, up, down, activation, norm, residual);
}

mx::array rms_norm(const mx::array& x, const RmsNormParams& norm) { return reference::rms_norm(x, norm); }

mx::array embedding(const mx::array& ids, const Weight& weight, mx::Dtype dtype) {
  return reference::embedding(ids, weight, dtype);
}

}  // namespace reprise::kernels
