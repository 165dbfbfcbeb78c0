#include "reprise/kernels/rg_lru.h"

#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

void check(const RgLruInputs& inputs, const std::optional<mx::array>& state) {
  const mx::array& x = inputs.x;
  const bool fits = x.ndim() == 3 && x.size() > 0 && inputs.input_gate.shape() == x.shape() &&
                    inputs.recurrent_gate.shape() == x.shape() && inputs.decay.shape() == mx::Shape{x.shape(2)} &&
                    (!inputs.real || (inputs.real->shape() == mx::Shape{x.shape(0), x.shape(1)} &&
                                      inputs.real->dtype() == mx::bool_)) &&
                    (!state || state->shape() == mx::Shape{x.shape(0), x.shape(2)});
  if (fits) return;
  throw Error(ErrorCode::invalid_argument,
              "[rg_lru] x and both gates [B, L, D], decay [D], real [B, L] and the state [B, D] must agree");
}

}  // namespace

RgLruResult rg_lru(const RgLruInputs& inputs, const std::optional<mx::array>& state) {
  check(inputs, state);
  return reference::rg_lru(inputs, state);
}

}  // namespace reprise::kernels
