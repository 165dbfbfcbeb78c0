#include "reprise/models/mamba_mixer.h"

#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"

namespace reprise::internal {

namespace mx = mlx::core;

int checked_size(std::int64_t size) {
  constexpr std::int64_t kLargest = 1 << 28;
  if (size > 0 && size <= kLargest) return static_cast<int>(size);
  throw Error(ErrorCode::corrupt_data,
              "[make_model] sizes of a recurrent layer must lie in [1, 2^28], but got " + std::to_string(size));
}

int step_rank(const Config& config, const std::string& key, int hidden_size) {
  return checked_size(config.get_int_or_auto(key).value_or(hidden_size / 16 + (hidden_size % 16 != 0 ? 1 : 0)));
}

mx::array MambaMixer::add_to(const mx::array& h, const Norm& norm, ArraysCache& cache, const RealColumns& real) const {
  const auto projected = project(h, norm, {x_proj, gate_proj});
  const ShortConvResult convolved = conv(projected[0], cache.get(0), real);
  const mx::array& x = convolved.output;
  auto maps = project(x, {step_down_proj, b_proj, c_proj});
  if (step_norm) maps[0] = (*step_norm)(maps[0]);
  if (b_norm) maps[1] = (*b_norm)(maps[1]);
  if (c_norm) maps[2] = (*c_norm)(maps[2]);
  const ScanResult scanned = selective_scan(
      {.x = x, .delta = step_proj(maps[0]), .b = maps[1], .c = maps[2], .gate = projected[1], .state = cache.get(1)},
      scan, real);
  cache.set(0, convolved.state);
  cache.set(1, scanned.state);
  return out_proj.add_to(h, scanned.y);
}

ShortConv take_ssm_conv(WeightReader& weights, const std::string& path, int channels, int width, bool bias) {
  ShortConv conv{.weight = weights.take_short_conv(path, channels, width), .activation = ConvActivation::silu};
  if (bias) conv.bias = weights.take(path + ".bias", {channels});
  return conv;
}

mx::array take_decay_rates(WeightReader& weights, const std::string& path, const mx::Shape& shape) {
  const std::string name = path + ".A_log";
  weights.transform(name, decay_rates);
  return weights.take_float32(name, shape);
}

MambaMixer take_mamba_mixer(WeightReader& weights, const std::string& path, const MambaSizes& sizes,
                            const MambaBiases& biases) {
  const int E = sizes.hidden_size;
  const int C = sizes.channels;
  const int N = sizes.states;
  const int rank = sizes.step_rank;
  auto in = weights.take_linears(path + ".in_proj", {C, C}, E, biases.projections);
  auto maps = weights.take_linears(path + ".x_proj", {rank, N, N}, C, false);
  return {.x_proj = std::move(in[0]),
          .gate_proj = std::move(in[1]),
          .conv = take_ssm_conv(weights, path + ".conv1d", C, sizes.conv_width, biases.conv),
          .step_down_proj = std::move(maps[0]),
          .b_proj = std::move(maps[1]),
          .c_proj = std::move(maps[2]),
          .step_proj = Linear(weights.take_weight(path + ".dt_proj", C, rank)),
          .scan = std::make_shared<const SelectiveScan>(
              SelectiveScan{.a = take_decay_rates(weights, path, {C, N}),
                            .d = weights.take_float32(path + ".D", {C}),
                            .steps = {.bias = weights.take_float32(path + ".dt_proj.bias", {C})}}),
          .out_proj = weights.take_linear(path + ".out_proj", E, C, biases.projections)};
}

}  // namespace reprise::internal
