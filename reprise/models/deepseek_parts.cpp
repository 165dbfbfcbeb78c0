#include "reprise/models/deepseek_parts.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Of the inner norms, whatever the config says of the others.
constexpr float kLatentNormEps = 1e-6f;

[[noreturn]] void corrupt(const std::string& what) { throw Error(ErrorCode::corrupt_data, "[make_model] " + what); }

mx::array by_heads(const mx::array& x, int heads) {
  return mx::transpose(mx::reshape(x, {x.shape(0), x.shape(1), heads, x.shape(2) / heads}), {0, 2, 1, 3});
}

std::pair<mx::array, mx::array> split_at(const mx::array& x, int features) {
  auto parts = mx::split(x, mx::Shape{features}, -1);
  return {std::move(parts[0]), std::move(parts[1])};
}

}  // namespace

LatentSizes LatentSizes::from(const Config& config) {
  LatentSizes sizes{.hidden_size = config.require_positive_int("hidden_size"),
                    .heads = config.require_positive_int("num_attention_heads"),
                    .q_lora_rank = {},
                    .kv_lora_rank = config.require_positive_int("kv_lora_rank"),
                    .nope = config.require_positive_int("qk_nope_head_dim"),
                    .rope = config.require_positive_int("qk_rope_head_dim"),
                    .value = config.require_positive_int("v_head_dim")};
  const std::int64_t features = std::int64_t{sizes.nope} + sizes.rope + sizes.value;
  if (features > std::numeric_limits<int>::max() / sizes.heads ||
      std::int64_t{sizes.kv_lora_rank} + sizes.rope > std::numeric_limits<int>::max()) {
    corrupt("heads of " + std::to_string(features) + " features are too large");
  }
  if (config.has("q_lora_rank")) sizes.q_lora_rank = config.require_positive_int("q_lora_rank");
  return sizes;
}

LatentProjections::Rows LatentProjections::operator()(const mx::array& h, const Norm& norm,
                                                      const Offset& offset) const {
  auto projected = project(h, norm, {q_low ? q_low->a_proj : q_proj, kv_a_proj});
  const mx::array q = q_low ? project(projected[0], q_low->a_layernorm, {q_proj})[0] : projected[0];
  const auto [content, positions] = split_at(by_heads(q, sizes.heads), sizes.nope);
  const auto [latent, key_positions] = split_at(projected[1], sizes.kv_lora_rank);
  return {.content = content,
          .positions = (*rope)(positions, offset),
          .latent = mx::expand_dims(kv_a_layernorm(latent), 1),
          .key_positions = (*rope)(mx::expand_dims(key_positions, 1), offset)};
}

LatentProjections take_latent_projections(WeightReader& weights, const Config& config, const std::string& path,
                                          const LatentSizes& sizes, std::shared_ptr<const Rope> rope) {
  const bool bias = config.get_bool("attention_bias").value_or(false);
  const int E = sizes.hidden_size;
  const int q = sizes.heads * (sizes.nope + sizes.rope);
  std::optional<LatentProjections::LowRank> q_low;
  if (const auto rank = sizes.q_lora_rank) {
    q_low = {weights.take_linear(path + ".q_a_proj", *rank, E, bias),
             weights.take_rms_norm(path + ".q_a_layernorm", *rank, kLatentNormEps)};
  }
  return {.sizes = sizes,
          .q_low = std::move(q_low),
          .q_proj = sizes.q_lora_rank ? weights.take_linear(path + ".q_b_proj", q, *sizes.q_lora_rank, false)
                                      : weights.take_linear(path + ".q_proj", q, E, false),
          .kv_a_proj = weights.take_linear(path + ".kv_a_proj_with_mqa", sizes.kv_lora_rank + sizes.rope, E, bias),
          .kv_a_layernorm = weights.take_rms_norm(path + ".kv_a_layernorm", sizes.kv_lora_rank, kLatentNormEps),
          .rope = std::move(rope)};
}

std::shared_ptr<const Rope> latent_rope(const Config& config, const LatentSizes& sizes) {
  RopeOptions options = config.rope(sizes.rope);
  options.traditional = config.get_bool("rope_interleave").value_or(true);
  return std::make_shared<const Rope>(options);
}

float latent_scale(const Config& config, const LatentSizes& sizes) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(sizes.nope + sizes.rope));
  const auto scaling = config.rope(sizes.rope).scaling;
  return scaling ? apply_yarn_mscale(scale, *scaling) : scale;
}

mx::array heads_joined(const mx::array& x) {
  return mx::reshape(mx::transpose(x, {0, 2, 1, 3}), {x.shape(0), x.shape(2), x.shape(1) * x.shape(3)});
}

mx::array RoutedAndShared::operator()(const mx::array& x) const {
  const mx::array routed = switch_mlp(x, router(x));
  return shared_experts ? mx::add(routed, (*shared_experts)(x)) : routed;
}

namespace {

bool has_experts(const Config& config, int layer) {
  const int frequency = config.get_int("moe_layer_freq").value_or(1);
  if (frequency < 1) corrupt("moe_layer_freq must be positive, but got " + std::to_string(frequency));
  return config.has("n_routed_experts") && layer >= config.get_int("first_k_dense_replace").value_or(0) &&
         layer % frequency == 0;
}

}  // namespace

DeepseekMlp take_deepseek_mlp(WeightReader& weights, const Config& config, const std::string& path, int layer,
                              const RouterKind& kind) {
  const int E = config.require_positive_int("hidden_size");
  if (!has_experts(config, layer)) {
    return take_gated_mlp(weights, path, E, config.require_positive_int("intermediate_size"));
  }
  const auto experts = ExpertCounts::from(config, "n_routed_experts", "num_experts_per_tok");
  const int F = config.require_positive_int("moe_intermediate_size");
  ExpertRouter router{.gate = weights.take_linear(path + ".gate", experts.all, E, false),
                      .scores = kind.scores,
                      .experts_per_token = experts.per_token,
                      .normalise = experts.per_token > 1 ? kind.normalise : NormaliseScores::no,
                      .scaling_factor = config.get_float("routed_scaling_factor").value_or(1.0f)};
  if (kind.group_members) router.limit = group_limit(config, experts, *kind.group_members);
  if (kind.has_correction_bias) {
    router.correction_bias = weights.take_float32(path + ".gate.e_score_correction_bias", {experts.all});
  }
  std::optional<GatedMlp> shared;
  if (const int count = config.get_int("n_shared_experts").value_or(0); count > 0) {
    if (count > std::numeric_limits<int>::max() / F) corrupt("n_shared_experts is too large");
    shared = take_gated_mlp(weights, path + ".shared_experts", E, F * count);
  }
  return RoutedAndShared{std::move(router), weights.take_switch_glu(path + ".switch_mlp", experts.all, E, F),
                         std::move(shared)};
}

}  // namespace reprise::internal
