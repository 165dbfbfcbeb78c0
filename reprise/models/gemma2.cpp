// Gemma 2: soft caps on attention's scores and on the logits. Gemma Team, https://arxiv.org/abs/2408.00118.
//
// The paper's every other layer sees a window of 4096 tokens. As in mlx-lm all layers see everything, so that caches of
// either are the other's; up to the window that is the same.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/gemma_layer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace {

constexpr const char* kDefaults = R"({
  "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 144.0
})";

}  // namespace

std::unique_ptr<LanguageModel> make_gemma2(const ModelFiles& files, const ModelOptions& options) {
  const Config config = Config(files.config_json).with_defaults(kDefaults);
  const auto sizes = AttentionSizes::from(config);
  require_gemma_activation(config);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = std::make_shared<const Rope>(config.rope(sizes.head_dim));
  std::vector<LayerKind> kinds(static_cast<std::size_t>(config.require_positive_int("num_hidden_layers")),
                               FullAttention{});
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes);
    attention.scale = 1.0f / std::sqrt(config.require_positive_float("query_pre_attn_scalar"));
    attention.softcap = config.require_positive_float("attn_logit_softcapping");
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    layers.push_back(make_layer(take_gemma_layer(weights, path, config, std::move(attention))));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = norm_eps(config), .norm_plus = kGemmaNormPlus});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  ends.embedding_scale = std::sqrt(static_cast<float>(sizes.hidden_size));
  ends.logit_softcap = config.require_positive_float("final_logit_softcapping");
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
