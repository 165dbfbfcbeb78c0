// Qwen3, dense: Llama's block with a norm of every head's query and key before the rotation.
// Yang et al., https://arxiv.org/abs/2505.09388.
#include <memory>
#include <string>
#include <utility>

#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/pre_norm_layer.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

std::unique_ptr<LanguageModel> make_qwen3(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const float eps = norm_eps(config);
  const bool bias = config.get_bool("attention_bias").value_or(false);
  const FeedForwardSizes mlp_sizes{sizes.hidden_size, config.require_positive_int("intermediate_size")};
  require_activation(config, "hidden_act", {"silu", "swish"});
  auto kinds = upper_window_kinds(config);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(sizes.head_dim), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {.qkv = bias, .output = bias});
    attention.q_norm = weights.take_rms_norm(path + ".self_attn.q_norm", sizes.head_dim, eps);
    attention.k_norm = weights.take_rms_norm(path + ".self_attn.k_norm", sizes.head_dim, eps);
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(make_layer(take_pre_norm_layer(weights, path, std::move(attention), mlp_sizes, eps)));
  }
  parts.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
