#include "reprise/models/mamba2_mixer.h"

#include <cstdint>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

void Mamba2Sizes::check() const {
  if (heads <= 0 || groups <= 0 || heads % groups != 0) {
    throw Error(ErrorCode::corrupt_data, "[make_model] a scan's heads must be a multiple of its groups, but got " +
                                             std::to_string(heads) + " and " + std::to_string(groups));
  }
  const std::int64_t inner = std::int64_t{heads} * checked_size(head_dim);
  const std::int64_t outer = std::int64_t{groups} * checked_size(states);
  checked_size(inner);
  checked_size(outer);
  checked_size(2 * inner + 2 * outer + heads);
}

// What norms and gates y [B, L, channels].
mx::array Mamba2Mixer::scanned(const mx::array& x, const Norm& input_norm, ArraysCache& cache,
                               const RealColumns& real) const {
  const auto projected = project(x, input_norm, {gate_proj, conv_proj, step_proj});
  const ShortConvResult convolved = conv(projected[1], cache.get(0), real);
  const auto channels = [&](int first, int count) {
    const mx::array& all = convolved.output;
    return mx::slice(all, {0, 0, first}, {all.shape(0), all.shape(1), first + count});
  };
  ScanInputs inputs{.x = channels(0, sizes.channels()),
                    .delta = projected[2],
                    .b = channels(sizes.channels(), sizes.maps()),
                    .c = channels(sizes.channels() + sizes.maps(), sizes.maps()),
                    .state = cache.get(1)};
  if (order != GateOrder::norm_then_gate) inputs.gate = projected[0];
  const ScanResult result = head_scan(std::move(inputs), scan, real);
  cache.set(0, convolved.state);
  cache.set(1, result.state);
  const mx::array& y = result.y;
  switch (order) {
    case GateOrder::gate_then_norm:
      return (*norm)(y);
    case GateOrder::gate_then_group_norms: {
      const mx::array grouped = mx::reshape(y, {y.shape(0), y.shape(1), sizes.groups, -1});
      return mx::multiply(mx::reshape((*norm)(grouped), y.shape()), *group_norm_weight);
    }
    case GateOrder::norm_then_gate:
      return swiglu(projected[0], (*norm)(y));
    case GateOrder::gate_only:
      break;
  }
  return y;
}

mx::array Mamba2Mixer::operator()(const mx::array& x, const Norm& input_norm, ArraysCache& cache,
                                  const RealColumns& real) const {
  return out_proj(scanned(x, input_norm, cache, real));
}

mx::array Mamba2Mixer::add_to(const mx::array& residual, const mx::array& x, const Norm& input_norm, ArraysCache& cache,
                              const RealColumns& real) const {
  return out_proj.add_to(residual, scanned(x, input_norm, cache, real));
}

void read_step_limits(const Config& config, Mamba2Options& options) {
  const auto limits = config.get_floats("time_step_limit");
  if (limits.empty()) return;
  if (limits.size() != 2 || !(limits[0] >= 0.0f && limits[0] <= limits[1])) {
    throw Error(ErrorCode::corrupt_data, "[make_model] time_step_limit must be two numbers in order, not negative");
  }
  options.step_low = limits[0];
  options.step_high = limits[1];
}

Mamba2Mixer take_mamba2_mixer(WeightReader& weights, const std::string& path, const Mamba2Sizes& sizes,
                              const Mamba2Options& options) {
  sizes.check();
  const int E = sizes.hidden_size;
  const int C = sizes.channels();
  auto in = weights.take_linears(path + ".in_proj", {C, sizes.conv_channels(), sizes.heads}, E, options.in_bias);
  Mamba2Mixer mixer{
      .sizes = sizes,
      .gate_proj = std::move(in[0]),
      .conv_proj = std::move(in[1]),
      .step_proj = std::move(in[2]),
      .conv = take_ssm_conv(weights, path + ".conv1d", sizes.conv_channels(), sizes.conv_width, options.conv_bias),
      .scan = std::make_shared<const HeadScan>(
          HeadScan{.a = take_decay_rates(weights, path, {sizes.heads}),
                   .d = weights.take_float32(path + ".D", {sizes.heads}),
                   .groups = sizes.groups,
                   .steps = {.bias = weights.take_float32(path + ".dt_bias", {sizes.heads}),
                             .low = options.step_low,
                             .high = options.step_high}}),
      .order = options.order,
      .out_proj = weights.take_linear(path + ".out_proj", E, C, options.out_bias)};
  if (options.order == GateOrder::gate_then_group_norms) {
    mixer.group_norm_weight = weights.take(path + ".norm.weight", {C});
    mixer.norm = unweighted_rms_norm(C / sizes.groups, options.norm_eps, weights.dtype());
  } else if (options.order != GateOrder::gate_only) {
    mixer.norm = weights.take_rms_norm(path + ".norm", C, options.norm_eps);
  }
  return mixer;
}

}  // namespace reprise::internal
