#include "reprise/nn/gated_delta.h"

#include <variant>

#include "mlx/array.h"

namespace reprise {

namespace mx = mlx::core;

GatedDeltaResult gated_delta(const GatedDeltaInputs& inputs, const GatedDeltaParams& params,
                             const GatedDeltaState& state, const RealColumns& real) {
  const ShortConvResult conv = params.conv(inputs.qkv, state.conv, real);
  kernels::DeltaRuleInputs rule_inputs{.qkv = conv.output, .a = inputs.a, .b = inputs.b};
  if (const auto* mask = std::get_if<mx::array>(&real.mask)) rule_inputs.real = *mask;
  const auto rule = kernels::gated_delta_rule(rule_inputs, params.rule, state.rule);
  return {rule.output, {conv.state, rule.state}};
}

}  // namespace reprise
