// Command R7B and Command A: attention and feed-forward side by side behind one norm. Three layers of four slide and
// rotate, the fourth sees everything and has no positions.
// Yang et al., https://arxiv.org/abs/2501.18795; Team Cohere, https://arxiv.org/abs/2504.00698.
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
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

struct Cohere2Layer {
  LayerNorm input_layernorm;
  AttentionBlock self_attn;
  GatedMlp mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array normed = input_layernorm(h);
    const mx::array r = self_attn.add_to(h, normed, std::nullopt, step.attention_cache(), step.mask);
    return mlp.add_to(r, normed);
  }
};

std::vector<LayerKind> layer_kinds(const Config& config) {
  std::vector<LayerKind> kinds = attention_kinds(config);
  if (config.has("layer_types")) return kinds;
  const bool has_pattern = config.has("sliding_window_pattern");
  const int pattern = has_pattern ? config.require_positive_int("sliding_window_pattern") : 4;
  const int window = config.has("sliding_window") ? config.require_positive_int("sliding_window") : 4096;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if ((i + 1) % static_cast<std::size_t>(pattern) != 0) kinds[i] = SlidingAttention{window};
  }
  return kinds;
}

}  // namespace

std::unique_ptr<LanguageModel> make_cohere2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "layer_norm_eps", 1e-5f);
  const bool bias = config.get_bool("attention_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});
  require_flag(config, "use_qk_norm", false);
  require_flag(config, "use_parallel_block", true);
  require_flag(config, "use_gated_activation", true);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  RopeOptions rope_options = config.rope(config.rotary_dims(sizes.head_dim), {.base_otherwise = 50000.0f});
  rope_options.traditional = true;
  const auto rope = make_rope(rope_options, weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps, .norm_kind = NormKind::layer});
  parts.logit_scale = config.get_float("logit_scale").value_or(0.0625f);
  parts.kinds = layer_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {bias, bias});
    if (std::holds_alternative<SlidingAttention>(parts.kinds[i])) attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(
        make_layer(Cohere2Layer{weights.take_layer_norm(path + ".input_layernorm", E, eps), std::move(attention),
                                take_gated_mlp(weights, path + ".mlp", E, F)}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
