// GLM-4-0414: norms before and after each block, half of each head rotated in neighbouring pairs, one matrix for gate
// and up. GLM Team, https://arxiv.org/abs/2406.12793; norms around blocks: Ding et al.,
// https://arxiv.org/abs/2105.13290.
#include <memory>
#include <string>
#include <utility>

#include "mlx/array.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/norms.h"

namespace reprise::internal {
namespace {

// post_attention_layernorm stands before the feed-forward block, as in Llama.
struct Glm4Layer {
  RmsNorm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_self_attn_layernorm;
  RmsNorm post_attention_layernorm;
  GatedMlp mlp;
  RmsNorm post_mlp_layernorm;

  mlx::core::array forward(const mlx::core::array& h, const LayerStep& step) const {
    const mlx::core::array r =
        self_attn.add_normed_to(h, h, input_layernorm, step.attention_cache(), step.mask, post_self_attn_layernorm);
    return mlp.add_normed_to(r, post_attention_layernorm, r, post_mlp_layernorm);
  }
};

}  // namespace

std::unique_ptr<LanguageModel> make_glm4(const ModelFiles& files, const ModelOptions& options) {
  const Config config = Config(files.config_json).with_defaults(R"({"rope_traditional": true})");
  const auto sizes = AttentionSizes::from(config);
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "rms_norm_eps", 1.5625e-7f);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(config.rotary_dims(sizes.head_dim, 0.5f)), weights);
  const auto take_norm = [&](const std::string& path) { return weights.take_rms_norm(path, sizes.hidden_size, eps); };

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  parts.kinds = attention_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {.qkv = attention_bias});
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(make_layer(Glm4Layer{
        take_norm(path + ".input_layernorm"), std::move(attention), take_norm(path + ".post_self_attn_layernorm"),
        take_norm(path + ".post_attention_layernorm"),
        take_fused_gated_mlp(weights, path + ".mlp", sizes.hidden_size, F), take_norm(path + ".post_mlp_layernorm")}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
