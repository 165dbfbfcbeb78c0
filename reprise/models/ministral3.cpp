// Ministral 3: Llama's block, whose queries grow with their position so that far ones stay as sharp as near ones, and
// sliding windows where the config names them. https://mistral.ai/news/mistral-3; the scale: Nakanishi,
// https://arxiv.org/abs/2501.19399.
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/pre_norm_layer.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// A query at position p is multiplied by 1 + beta · ln(1 + ⌊p / length⌋).
struct QueryScale {
  float beta;
  int length;

  // x [B, L, …] from position `offset` on → the scales [1 or B, L, 1].
  mx::array operator()(const mx::array& x, const Offset& offset) const {
    mx::array positions = mx::arange(x.shape(1));
    if (const int* first = std::get_if<int>(&offset)) {
      positions = mx::reshape(mx::add(positions, mx::array(*first)), {1, -1, 1});
    } else {
      positions = mx::expand_dims(mx::add(positions, mx::expand_dims(std::get<mx::array>(offset), 1)), 2);
    }
    // Columns before a row's first token have negative positions; nothing reads them.
    const mx::array times = mx::maximum(mx::floor_divide(positions, mx::array(length)), mx::array(0));
    const mx::array grown = mx::multiply(mx::array(beta), mx::log1p(mx::astype(times, mx::float32)));
    return mx::astype(mx::add(mx::array(1.0f), grown), x.dtype());
  }
};

struct Ministral3Layer {
  PreNormLayer block;
  std::optional<QueryScale> query_scale;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    if (!query_scale) return block.forward(h, step);
    const AttentionBlock& self_attn = block.self_attn;
    AttentionCache& cache = step.attention_cache();
    Projections projections = self_attn.project(h, block.input_layernorm);
    projections.queries = mx::multiply(projections.queries, (*query_scale)(h, cache.offset()));
    const mx::array r = self_attn.o_proj.add_to(h, self_attn.attend(projections, cache, step.mask));
    return block.mlp.add_to(r, block.post_attention_layernorm, r);
  }
};

std::optional<QueryScale> query_scale(const Config& config) {
  const auto rope = config.get_object("rope_parameters");
  const auto beta = rope ? rope->get_float("llama_4_scaling_beta") : std::nullopt;
  if (!beta || *beta == 0.0f) return {};
  if (!std::isfinite(*beta)) throw Error(ErrorCode::corrupt_data, "[make_model] llama_4_scaling_beta must be finite");
  return QueryScale{*beta, rope->require_positive_int("original_max_position_embeddings")};
}

}  // namespace

std::unique_ptr<LanguageModel> make_ministral3(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const float eps = norm_eps(config);
  const FeedForwardSizes mlp_sizes{sizes.hidden_size, config.require_positive_int("intermediate_size")};
  const auto scale = query_scale(config);
  require_activation(config, "hidden_act", {"silu", "swish"});
  require_flag(config, "attention_bias", false);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  const auto rope = make_rope(config.rope(sizes.head_dim), weights);

  auto parts = take_decoder_ends(weights, config, {.norm_eps = eps});
  parts.kinds = same_attention_kinds(config);
  for (std::size_t i = 0; i < parts.kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes);
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    parts.layers.push_back(
        make_layer(Ministral3Layer{take_pre_norm_layer(weights, path, std::move(attention), mlp_sizes, eps), scale}));
  }
  return make_decoder(config, weights, std::move(parts));
}

}  // namespace reprise::internal
