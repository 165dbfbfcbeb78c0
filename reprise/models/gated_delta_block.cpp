#include "reprise/models/gated_delta_block.h"

#include <cstdint>
#include <numeric>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

GatedDeltaSizes GatedDeltaSizes::from(const Config& config) {
  const GatedDeltaSizes sizes{.hidden_size = config.require_positive_int("hidden_size"),
                              .key_heads = config.require_positive_int("linear_num_key_heads"),
                              .value_heads = config.require_positive_int("linear_num_value_heads"),
                              .key_dim = config.require_positive_int("linear_key_head_dim"),
                              .value_dim = config.require_positive_int("linear_value_head_dim"),
                              .conv_width = config.require_positive_int("linear_conv_kernel_dim")};
  const std::int64_t channels =
      std::int64_t{2} * sizes.key_heads * sizes.key_dim + std::int64_t{2} * sizes.value_heads * sizes.value_dim;
  if (sizes.value_heads % sizes.key_heads != 0 || channels > (1 << 24)) {
    throw Error(ErrorCode::corrupt_data,
                "[make_model] linear_num_value_heads must be a multiple of linear_num_key_heads, but got " +
                    std::to_string(sizes.value_heads) + " and " + std::to_string(sizes.key_heads));
  }
  return sizes;
}

mx::array GatedDeltaBlock::add_to(const mx::array& residual, const Norm& input_norm, ArraysCache& cache,
                                  const RealColumns& real) const {
  const auto projected = project(residual, input_norm, {in_proj_qkv, in_proj_z, in_proj_b, in_proj_a});
  const auto result = gated_delta({.qkv = projected[0], .a = projected[3], .b = projected[2]}, delta,
                                  {.conv = cache.get(0), .rule = cache.get(1)}, real);
  cache.set(0, result.state.conv);
  cache.set(1, result.state.rule);
  const mx::array& z = projected[1];
  return out_proj.add_to(residual, swiglu(z, mx::reshape(norm(result.output), z.shape())));
}

void ungroup_rows(WeightReader& weights, const std::string& path, int groups, const std::vector<int>& sizes) {
  const int per_group = std::accumulate(sizes.begin(), sizes.end(), 0);
  for (const char* part : {".weight", ".scales", ".biases", ".bias"}) {
    if (!weights.has(path + part)) continue;
    weights.transform(path + part, [&](const mx::array& rows) {
      if (rows.size() == 0 || rows.ndim() < 1 || rows.shape(0) != groups * per_group) return rows;
      const mx::array grouped = mx::reshape(rows, {groups, per_group, -1});
      const int columns = grouped.shape(2);
      std::vector<mx::array> maps;
      int first = 0;
      for (const int size : sizes) {
        const mx::array map = mx::slice(grouped, {0, first, 0}, {groups, first + size, columns});
        maps.push_back(mx::reshape(map, {groups * size, columns}));
        first += size;
      }
      return mx::reshape(mx::concatenate(maps, 0), rows.shape());
    });
  }
}

namespace {

GatedDeltaParams take_params(WeightReader& weights, const std::string& path, const GatedDeltaSizes& s) {
  weights.transform(path + ".A_log", [](const mx::array& a) { return mx::exp(mx::astype(a, mx::float32)); });
  return {.conv = {.weight = weights.take_short_conv(path + ".conv1d", s.channels(), s.conv_width),
                   .activation = ConvActivation::silu},
          .rule = {.key_heads = s.key_heads,
                   .value_heads = s.value_heads,
                   .key_dim = s.key_dim,
                   .value_dim = s.value_dim,
                   .decay = weights.take_float32(path + ".A_log", {s.value_heads}),
                   .dt_bias = weights.take_float32(path + ".dt_bias", {s.value_heads})}};
}

// qkv, z, b, a.
std::vector<Linear> take_in_projs(WeightReader& weights, const std::string& path, const GatedDeltaSizes& s) {
  const int E = s.hidden_size;
  if (!weights.has(path + ".in_proj_qkvz.weight")) {
    return {weights.take_linear(path + ".in_proj_qkv", s.channels(), E, false),
            weights.take_linear(path + ".in_proj_z", s.values(), E, false),
            weights.take_linear(path + ".in_proj_b", s.value_heads, E, false),
            weights.take_linear(path + ".in_proj_a", s.value_heads, E, false)};
  }
  const int heads = s.value_heads / s.key_heads;
  ungroup_rows(weights, path + ".in_proj_qkvz", s.key_heads,
               {s.key_dim, s.key_dim, heads * s.value_dim, heads * s.value_dim});
  ungroup_rows(weights, path + ".in_proj_ba", s.key_heads, {heads, heads});
  auto in_projs = weights.take_linears(path + ".in_proj_qkvz", {s.channels(), s.values()}, E, false);
  for (Linear& map : weights.take_linears(path + ".in_proj_ba", {s.value_heads, s.value_heads}, E, false)) {
    in_projs.push_back(std::move(map));
  }
  return in_projs;
}

}  // namespace

GatedDeltaBlock take_gated_delta(WeightReader& weights, const std::string& path, const GatedDeltaSizes& sizes,
                                 float norm_eps) {
  auto in_projs = take_in_projs(weights, path, sizes);
  return {.in_proj_qkv = std::move(in_projs[0]),
          .in_proj_z = std::move(in_projs[1]),
          .in_proj_b = std::move(in_projs[2]),
          .in_proj_a = std::move(in_projs[3]),
          .delta = take_params(weights, path, sizes),
          .norm = weights.take_rms_norm(path + ".norm", sizes.value_dim, norm_eps),
          .out_proj = weights.take_linear(path + ".out_proj", sizes.hidden_size, sizes.values(), false)};
}

}  // namespace reprise::internal
