// DeepSeek V2: latent attention whose cache holds each head's keys and values, experts chosen by their softmax.
// DeepSeek-AI, https://arxiv.org/abs/2405.04434.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/deepseek_checkpoint.h"
#include "reprise/models/deepseek_parts.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct DeepseekV2Attention {
  LatentProjections projections;
  Linear kv_b_proj;  // latent → content features of keys, and values
  Linear o_proj;
  float scale;
  mx::Dtype stored_dtype;

  mx::array add_to(const mx::array& h, const Norm& norm, AttentionCache& cache, const Mask& mask) const {
    const LatentSizes& sizes = projections.sizes;
    const auto rows = projections(h, norm, cache.offset());
    const mx::array kv = kv_b_proj(mx::squeeze(rows.latent, 1));
    const mx::array by_heads =
        mx::transpose(mx::reshape(kv, {kv.shape(0), kv.shape(1), sizes.heads, sizes.nope + sizes.value}), {0, 2, 1, 3});
    const std::vector<mx::array> parts = mx::split(by_heads, mx::Shape{sizes.nope}, -1);
    const mx::array queries = mx::concatenate({rows.content, rows.positions}, -1);
    const mx::array keys =
        mx::concatenate({parts[0], mx::broadcast_to(rows.key_positions, rows.positions.shape())}, -1);
    const mx::array out =
        cache.attend(queries, keys, parts[1], {.scale = scale, .mask = mask, .stored_dtype = stored_dtype});
    return o_proj.add_to(h, heads_joined(out));
  }
};

struct DeepseekV2Layer {
  Norm input_layernorm;
  DeepseekV2Attention self_attn;
  RmsNorm post_attention_layernorm;
  DeepseekMlp mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, input_layernorm, step.attention_cache(), step.mask);
    return add_feed_forward(r, post_attention_layernorm, mlp);
  }
};

RouterKind router_kind(const Config& config) {
  RouterKind kind{.scores = ExpertRouter::Scores::softmax};
  const std::string method = config.get_string("topk_method").value_or("greedy");
  if (method == "group_limited_greedy") {
    kind.group_members = 1;
  } else if (method != "greedy" && method != "gready") {  // as mlx-lm's default has it
    throw Error(ErrorCode::unsupported, "[make_model] topk_method '" + method + "' is not supported");
  }
  require_activation(config, "scoring_func", {"softmax"});
  if (config.get_bool("norm_topk_prob").value_or(false)) {
    throw Error(ErrorCode::unsupported, "[make_model] norm_topk_prob is not supported for deepseek_v2");
  }
  return kind;
}

}  // namespace

std::unique_ptr<LanguageModel> make_deepseek_v2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = LatentSizes::from(config);
  const int E = sizes.hidden_size;
  const int layers = config.require_positive_int("num_hidden_layers");
  const float eps = norm_eps(config);
  const bool bias = config.get_bool("attention_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});
  const RouterKind kind = router_kind(config);
  const auto rope = latent_rope(config, sizes);

  WeightReader weights(files, deepseek_quantization(config), options);
  to_mlx_layout(weights, config);
  std::vector<std::unique_ptr<DecoderLayer>> decoder_layers;
  for (int i = 0; i < layers; ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    const std::string attention = path + ".self_attn";
    decoder_layers.push_back(make_layer(DeepseekV2Layer{
        .input_layernorm = weights.take_rms_norm(path + ".input_layernorm", E, eps),
        .self_attn = {.projections = take_latent_projections(weights, config, attention, sizes, rope),
                      .kv_b_proj =
                          weights.take_linear(attention + ".kv_b_proj", sizes.heads * (sizes.nope + sizes.value),
                                              sizes.kv_lora_rank, false),
                      .o_proj = weights.take_linear(attention + ".o_proj", E, sizes.heads * sizes.value, bias),
                      .scale = latent_scale(config, sizes),
                      .stored_dtype = kv_dtype(options, weights.dtype())},
        .post_attention_layernorm = weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
        .mlp = take_deepseek_mlp(weights, config, path + ".mlp", i, kind)}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  ends.layers = std::move(decoder_layers);
  ends.kinds = std::vector<LayerKind>(static_cast<std::size_t>(layers), FullAttention{});
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
