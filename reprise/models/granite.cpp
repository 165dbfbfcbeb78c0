// Granite 3.x, dense: Llama's block with four multipliers, of embeddings, attention scores, residuals and logits.
// Granite Team, https://github.com/ibm-granite/granite-3.0-language-models; the multipliers: Yang et al.,
// https://arxiv.org/abs/2203.03466.
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/pre_norm_layer.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct GraniteLayer {
  PreNormLayer block;
  float residual_multiplier;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array attended = block.self_attn(h, block.input_layernorm, step.attention_cache(), step.mask);
    const mx::array r = mx::add(h, scaled(attended));
    return mx::add(r, scaled(block.mlp(block.post_attention_layernorm(r))));
  }

  mx::array scaled(const mx::array& x) const { return mx::multiply(x, mx::array(residual_multiplier, x.dtype())); }
};

float multiplier(const Config& config, const std::string& key) {
  const float value = config.get_float(key).value_or(1.0f);
  if (value > 0.0f && std::isfinite(value)) return value;
  throw Error(ErrorCode::corrupt_data, "[make_model] " + key + " must be positive, but got " + std::to_string(value));
}

}  // namespace

std::unique_ptr<LanguageModel> make_granite(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const float eps = norm_eps(config);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  const FeedForwardSizes mlp_sizes{sizes.hidden_size, config.require_positive_int("intermediate_size"),
                                   config.get_bool("mlp_bias").value_or(false)};
  const float attention_multiplier = multiplier(config, "attention_multiplier");
  const float residual_multiplier = multiplier(config, "residual_multiplier");
  require_activation(config, "hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(sizes.head_dim), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  parts.embedding_scale = multiplier(config, "embedding_multiplier");
  parts.logit_scale = 1.0f / multiplier(config, "logits_scaling");
  parts.kinds = attention_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {attention_bias, attention_bias});
    attention.scale = attention_multiplier;
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(make_layer(
        GraniteLayer{take_pre_norm_layer(weights, path, std::move(attention), mlp_sizes, eps), residual_multiplier}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
