#include "reprise/nn/rg_lru.h"

#include <variant>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

// x [B, L, D] → [B, L, D], each block by its own weight.
mx::array block_linear(const mx::array& x, const mx::array& weight, const mx::array& bias) {
  const int H = weight.shape(0);
  const mx::array blocks = mx::reshape(x, {x.shape(0), x.shape(1), H, -1});
  const mx::array mapped = mx::swapaxes(mx::matmul(mx::swapaxes(blocks, 1, 2), weight), 1, 2);
  return mx::reshape(mx::add(mapped, bias), x.shape());
}

bool are_gates(const mx::array& weight, const mx::array& bias, int D) {
  return weight.ndim() == 3 && weight.shape(1) == weight.shape(2) && weight.shape(0) * weight.shape(1) == D &&
         bias.shape() == mx::Shape{weight.shape(0), weight.shape(1)};
}

}  // namespace

RgLruResult rg_lru(const mx::array& x, const RgLruParams& params, const std::optional<mx::array>& state,
                   const RealColumns& real) {
  const bool fits = x.ndim() == 3 && are_gates(params.input_gate_weight, params.input_gate_bias, x.shape(2)) &&
                    are_gates(params.recurrent_gate_weight, params.recurrent_gate_bias, x.shape(2));
  if (!fits) {
    throw Error(ErrorCode::invalid_argument, "[rg_lru] x [B, L, H d], gates [H, d, d] and biases [H, d] must agree");
  }
  kernels::RgLruInputs inputs{
      .x = x,
      .input_gate = block_linear(x, params.input_gate_weight, params.input_gate_bias),
      .recurrent_gate = block_linear(x, params.recurrent_gate_weight, params.recurrent_gate_bias),
      .decay = params.decay};
  if (const auto* mask = std::get_if<mx::array>(&real.mask)) inputs.real = *mask;
  return kernels::rg_lru(inputs, state);
}

}  // namespace reprise
