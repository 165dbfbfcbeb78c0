// DeepSeek V3 and what has its architecture (Kimi K2): latent attention whose cache holds the latents, experts chosen
// by corrected sigmoids within the best groups. DeepSeek-AI, https://arxiv.org/abs/2412.19437.
#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/deepseek_checkpoint.h"
#include "reprise/models/deepseek_parts.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mla.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct DeepseekV3Layer {
  Norm input_layernorm;
  LatentProjections projections;
  LatentAttention attention;
  Linear o_proj;
  mx::Dtype stored_dtype;
  RmsNorm post_attention_layernorm;
  DeepseekMlp mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    AttentionCache& cache = step.attention_cache();
    const auto rows = projections(h, input_layernorm, cache.offset());
    const KeysValues stored = cache.store(rows.latent, rows.key_positions, stored_dtype);
    const mx::array out = attention(rows.content, rows.positions, stored, step.mask);
    return add_feed_forward(o_proj.add_to(h, heads_joined(out)), post_attention_layernorm, mlp);
  }
};

RouterKind router_kind(const Config& config) {
  if (const auto method = config.get_string("topk_method"); method && *method != "noaux_tc") {
    throw Error(ErrorCode::unsupported, "[make_model] topk_method must be noaux_tc, but got '" + *method + "'");
  }
  require_activation(config, "scoring_func", {"sigmoid"});
  return {.scores = ExpertRouter::Scores::sigmoid,
          .group_members = 2,
          .has_correction_bias = true,
          .normalise = config.get_bool("norm_topk_prob").value_or(true) ? NormaliseScores::yes : NormaliseScores::no};
}

}  // namespace

std::unique_ptr<LanguageModel> make_deepseek_v3(const ModelFiles& files, const ModelOptions& options) {
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
    split_kv_b_proj(weights, attention, sizes);
    decoder_layers.push_back(make_layer(
        DeepseekV3Layer{.input_layernorm = weights.take_rms_norm(path + ".input_layernorm", E, eps),
                        .projections = take_latent_projections(weights, config, attention, sizes, rope),
                        .attention = {.embed_q = weights.take_multi_linear(attention + ".embed_q", sizes.heads,
                                                                           sizes.kv_lora_rank, sizes.nope),
                                      .unembed_out = weights.take_multi_linear(attention + ".unembed_out", sizes.heads,
                                                                               sizes.value, sizes.kv_lora_rank),
                                      .scale = latent_scale(config, sizes)},
                        .o_proj = weights.take_linear(attention + ".o_proj", E, sizes.heads * sizes.value, bias),
                        .stored_dtype = kv_dtype(options, weights.dtype()),
                        .post_attention_layernorm = weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                        .mlp = take_deepseek_mlp(weights, config, path + ".mlp", i, kind)}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  ends.layers = std::move(decoder_layers);
  ends.kinds = std::vector<LayerKind>(static_cast<std::size_t>(layers), FullAttention{});
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
