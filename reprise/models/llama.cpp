// The Llama family: Llama 2 and 3.x, SmolLM2 and 3, Mistral, with sliding windows where the config names them.
// Grattafiori et al., https://arxiv.org/abs/2407.21783; layers without positions: Yang et al.,
// https://arxiv.org/abs/2501.18795.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/pre_norm_layer.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {
namespace {

// Mistral's window holds for every layer; where layer types are named, they say which.
std::vector<LayerKind> layer_kinds(const Config& config) {
  const std::string model_type = config.require_string("model_type");
  if (model_type == "mistral") return same_attention_kinds(config);
  if (model_type == "iquestcoder") return upper_window_kinds(config);
  if (model_type == "smollm3" && !config.has("layer_types")) require_flag(config, "use_sliding_window", false);
  return attention_kinds(config);
}

// SmolLM3 leaves positions out of some layers: 0 in no_rope_layers, else each no_rope_layer_interval-th.
std::vector<bool> rotated_layers(const Config& config, std::size_t layers) {
  std::vector<bool> rotated(layers, true);
  if (config.require_string("model_type") != "smollm3") return rotated;
  if (config.has("no_rope_layers")) {
    rotated = config.get_bools("no_rope_layers");
    if (rotated.size() == layers) return rotated;
    throw Error(ErrorCode::corrupt_data, "[make_model] no_rope_layers must have " + std::to_string(layers) +
                                             " entries, but got " + std::to_string(rotated.size()));
  }
  const auto interval =
      config.has("no_rope_layer_interval") ? config.require_positive_int("no_rope_layer_interval") : 4;
  for (std::size_t i = 0; i < layers; ++i) rotated[i] = (i + 1) % static_cast<std::size_t>(interval) != 0;
  return rotated;
}

}  // namespace

std::unique_ptr<LanguageModel> make_llama(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const float eps = norm_eps(config);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  const FeedForwardSizes mlp_sizes{sizes.hidden_size, config.require_positive_int("intermediate_size"),
                                   config.get_bool("mlp_bias").value_or(false)};
  require_activation(config, "hidden_act", {"silu", "swish"});
  require_absent(config, "clip_qkv");
  auto kinds = layer_kinds(config);
  const std::vector<bool> rotated = rotated_layers(config, kinds.size());

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(sizes.head_dim), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {attention_bias, attention_bias});
    if (rotated[i]) attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(make_layer(take_pre_norm_layer(weights, path, std::move(attention), mlp_sizes, eps)));
  }
  parts.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
