#include "reprise/nn/short_conv.h"

#include <variant>

namespace reprise {

namespace mx = mlx::core;

ShortConvResult ShortConv::operator()(const mx::array& x, const std::optional<mx::array>& state,
                                      const RealColumns& real) const {
  kernels::ShortConvInputs inputs{.x = x, .state = state, .lengths = real.lengths};
  if (const auto* mask = std::get_if<mx::array>(&real.mask)) inputs.mask = *mask;
  return kernels::short_conv(inputs, {.weight = weight, .bias = bias, .activation = activation});
}

}  // namespace reprise
