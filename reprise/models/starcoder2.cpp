// StarCoder2: biases everywhere, norms by mean and variance, a feed-forward block of two maps.
// Lozhkov et al., https://arxiv.org/abs/2402.19173.
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
#include "reprise/nn/linear.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct StarCoder2Layer {
  LayerNorm input_layernorm;
  AttentionBlock self_attn;
  LayerNorm post_attention_layernorm;
  Linear c_fc;
  Linear c_proj;
  mx::array (*activation)(const mx::array&);

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return c_proj.add_to(r, activation(c_fc(post_attention_layernorm(r))));
  }
};

}  // namespace

std::unique_ptr<LanguageModel> make_starcoder2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "norm_epsilon", 1e-5f);
  const bool bias = config.get_bool("use_bias").value_or(true);
  require_activation(config, "hidden_act", {"gelu", "gelu_pytorch_tanh"});
  require_activation(config, "norm_type", {"layer_norm"});
  require_activation(config, "mlp_type", {"default"});
  const auto activation = config.get_string("hidden_act") == "gelu_pytorch_tanh" ? gelu_tanh : gelu;

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(sizes.head_dim, {.base_otherwise = 100000.0f}), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps, .norm_kind = NormKind::layer});
  parts.kinds = same_attention_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {bias, bias});
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(
        make_layer(StarCoder2Layer{weights.take_layer_norm(path + ".input_layernorm", E, eps), std::move(attention),
                                   weights.take_layer_norm(path + ".post_attention_layernorm", E, eps),
                                   weights.take_linear(path + ".mlp.c_fc", F, E, bias),
                                   weights.take_linear(path + ".mlp.c_proj", E, F, bias), activation}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
