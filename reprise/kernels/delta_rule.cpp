#include "reprise/kernels/delta_rule.h"

#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

void check(const DeltaRuleInputs& inputs, const DeltaRuleParams& p, const std::optional<mx::array>& state) {
  const auto fail = [] {
    throw Error(ErrorCode::invalid_argument,
                "[gated_delta_rule] qkv [B, L, 2 Hk Dk + Hv Dv], a and b [B, L, Hv], real [B, L] and the state "
                "[B, Hv, Dv, Dk] must agree");
  };
  const bool heads = p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0 && p.key_dim > 0 &&
                     p.value_dim > 0 && p.decay.shape() == mx::Shape{p.value_heads} &&
                     p.dt_bias.shape() == p.decay.shape();
  if (!heads || inputs.qkv.ndim() != 3 || inputs.qkv.size() == 0) fail();
  const int B = inputs.qkv.shape(0);
  const int L = inputs.qkv.shape(1);
  const mx::Shape per_head = {B, L, p.value_heads};
  const bool fits = inputs.qkv.shape(2) == 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim &&
                    inputs.a.shape() == per_head && inputs.b.shape() == per_head &&
                    (!inputs.real || (inputs.real->shape() == mx::Shape{B, L} && inputs.real->dtype() == mx::bool_)) &&
                    (!state || state->shape() == mx::Shape{B, p.value_heads, p.value_dim, p.key_dim});
  if (!fits) fail();
}

}  // namespace

DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mx::array>& state) {
  check(inputs, params, state);
  return reference::gated_delta_rule(inputs, params, state);
}

}  // namespace reprise::kernels
