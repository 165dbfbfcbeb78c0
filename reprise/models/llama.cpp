// The Llama family: Llama 2 and 3.x, SmolLM2, Mistral, with sliding windows where the config names them.
// Grattafiori et al., https://arxiv.org/abs/2407.21783.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "reprise/base/error.h"
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

struct LlamaLayer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  GatedMlp mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return mlp.add_to(r, post_attention_layernorm, r);
  }
};

// Mistral's window holds for every layer; where layer types are named, they say which.
std::vector<LayerKind> layer_kinds(const Config& config) {
  const auto window = config.get_int("sliding_window");
  if (config.get_strings("layer_types").empty() && window && config.require_string("model_type") == "mistral") {
    const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
    return std::vector<LayerKind>(layers, SlidingAttention{config.require_positive_int("sliding_window")});
  }
  return attention_kinds(config);
}

}  // namespace

std::unique_ptr<LanguageModel> make_llama(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  const bool mlp_bias = config.get_bool("mlp_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});
  auto kinds = layer_kinds(config);

  WeightReader weights(files.weights, config.quantization_overrides(), compute_dtype(options, files.weights));
  drop_rotary_buffers(weights);
  RopeOptions rope_options = config.rope(sizes.head_dim);
  rope_options.scaling = with_freq_factors(rope_options, weights);
  const auto rope = std::make_shared<const Rope>(rope_options);

  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {attention_bias, attention_bias});
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    layers.push_back(
        make_layer(LlamaLayer{weights.take_rms_norm(path + ".input_layernorm", E, eps), std::move(attention),
                              weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                              take_gated_mlp(weights, path + ".mlp", E, F, mlp_bias)}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  weights.finish();
  return std::make_unique<DecoderModel>(model_info(config, weights),
                                        DecoderParts{.embed_tokens = std::move(ends.embed_tokens),
                                                     .layers = std::move(layers),
                                                     .kinds = std::move(kinds),
                                                     .norm = std::move(ends.norm),
                                                     .lm_head = std::move(ends.lm_head)});
}

}  // namespace reprise::internal
