// OLMo 2 and 3: each block's output is normed instead of its input, queries and keys over all heads at once. OLMo 3 has
// sliding windows in three layers of four, whose rotations stay as they are where a scaling stretches the full ones.
// OLMo Team, https://arxiv.org/abs/2501.00656, https://arxiv.org/abs/2512.13961.
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct OlmoLayer {
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  GatedMlp mlp;
  RmsNorm post_feedforward_layernorm;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array attended = self_attn(h, std::nullopt, step.attention_cache(), step.mask);
    const mx::array r = mx::add(h, post_attention_layernorm(attended));
    return mx::add(r, post_feedforward_layernorm(mlp(r)));
  }
};

std::vector<LayerKind> olmo3_kinds(const Config& config) {
  std::vector<LayerKind> kinds = attention_kinds(config);
  if (config.has("layer_types")) return kinds;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if ((i + 1) % 4 != 0) kinds[i] = SlidingAttention{config.require_positive_int("sliding_window")};
  }
  return kinds;
}

std::unique_ptr<LanguageModel> make_olmo(const ModelFiles& files, const ModelOptions& options, const Config& config,
                                         std::vector<LayerKind> kinds) {
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  const bool mlp_bias = config.get_bool("mlp_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});
  require_absent(config, "clip_qkv");

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  RopeOptions rope_options = config.rope(sizes.head_dim);
  const auto full_rope = make_rope(rope_options, weights);
  rope_options.scaling = std::nullopt;
  const auto sliding_rope = make_rope(rope_options, weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {attention_bias, attention_bias});
    attention.q_norm = weights.take_rms_norm(path + ".self_attn.q_norm", sizes.heads * sizes.head_dim, eps);
    attention.k_norm = weights.take_rms_norm(path + ".self_attn.k_norm", sizes.kv_heads * sizes.head_dim, eps);
    attention.rope = std::holds_alternative<SlidingAttention>(kinds[i]) ? sliding_rope : full_rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(
        make_layer(OlmoLayer{std::move(attention), weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                             take_gated_mlp(weights, path + ".mlp", E, F, mlp_bias),
                             weights.take_rms_norm(path + ".post_feedforward_layernorm", E, eps)}));
  }
  parts.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace

std::unique_ptr<LanguageModel> make_olmo2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  return make_olmo(files, options, config, attention_kinds(config));
}

std::unique_ptr<LanguageModel> make_olmo3(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  return make_olmo(files, options, config, olmo3_kinds(config));
}

}  // namespace reprise::internal
