// Phi-3, 3.5 and 4, the dense ones: Llama's block with its projections stored as one matrix each, and rotations that
// may leave a part of the head alone. Abdin et al., https://arxiv.org/abs/2404.14219.
#include <cmath>
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
#include "reprise/nn/mlp.h"

namespace reprise::internal {
namespace {

AttentionBlock take_fused_attention(WeightReader& weights, const std::string& path, const AttentionSizes& sizes) {
  const int q = sizes.heads * sizes.head_dim;
  const int kv = sizes.kv_heads * sizes.head_dim;
  const auto qkv = weights.take_linears(path + ".qkv_proj", {q, kv, kv}, sizes.hidden_size, false);
  return {.sizes = sizes,
          .q_proj = qkv[0],
          .k_proj = qkv[1],
          .v_proj = qkv[2],
          .o_proj = weights.take_linear(path + ".o_proj", sizes.hidden_size, q, false),
          .scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim))};
}

// LongRoPE has had three names; the length it stretches stands beside it.
RopeOptions rope_options(const Config& config, int head_dim) {
  RopeOptions options = config.rope(config.rotary_dims(head_dim));
  if (!options.scaling || options.scaling->type == "default" || options.scaling->type == "linear") return options;
  RopeScaling& scaling = *options.scaling;
  if (scaling.type == "su" || scaling.type == "yarn") scaling.type = "longrope";
  if (scaling.type != "longrope") {
    throw Error(ErrorCode::unsupported,
                "[make_model] rope type must be longrope, linear or default, but got '" + scaling.type + "'");
  }
  if (!scaling.original_max_position_embeddings) {
    scaling.original_max_position_embeddings = config.get_int("original_max_position_embeddings").value_or(4096);
  }
  if (!options.max_position_embeddings) options.max_position_embeddings = 131072;
  return options;
}

}  // namespace

std::unique_ptr<LanguageModel> make_phi3(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config);
  require_activation(config, "hidden_act", {"silu", "swish"});
  require_flag(config, "attention_bias", false);
  require_flag(config, "mlp_bias", false);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(rope_options(config, sizes.head_dim), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  parts.kinds = same_attention_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_fused_attention(weights, path + ".self_attn", sizes);
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(
        make_layer(PreNormLayer{weights.take_rms_norm(path + ".input_layernorm", E, eps), std::move(attention),
                                weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                                take_fused_gated_mlp(weights, path + ".mlp", E, F)}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
