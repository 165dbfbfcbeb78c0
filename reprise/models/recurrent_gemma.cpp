// RecurrentGemma, whose model is Griffin: real-gated linear recurrent units and, in every third layer, local attention.
// De et al., https://arxiv.org/abs/2402.19427; Botev et al., https://arxiv.org/abs/2404.07839.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/rg_lru.h"
#include "reprise/nn/short_conv.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// mlx-lm's norms before the blocks do not follow rms_norm_eps.
constexpr float kBlockNormEps = 1e-5f;

// What follows the temporal block of every layer.
struct ChannelBlock {
  RmsNorm channel_pre_norm;
  GatedMlp mlp_block;

  mx::array add_to(const mx::array& h) const { return mlp_block.add_to(h, channel_pre_norm, h); }
};

struct AttentionLayer {
  Norm temporal_pre_norm;
  AttentionBlock temporal_block;
  ChannelBlock rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    return rest.add_to(temporal_block.add_to(h, h, temporal_pre_norm, step.attention_cache(), step.mask));
  }
};

// h + linear_out(gelu(linear_y(x)) · rg_lru(conv(linear_x(x)))) over the normed h.
struct RecurrentLayer {
  Norm temporal_pre_norm;
  Linear linear_x;
  Linear linear_y;
  Linear linear_out;
  ShortConv conv;
  RgLruParams lru;
  ChannelBlock rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    ArraysCache& cache = step.recurrent_cache();
    const auto projected = project(h, temporal_pre_norm, {linear_x, linear_y});
    const auto inputs = conv(projected[0], cache.get(0), step.real_columns);
    const auto outputs = rg_lru(inputs.output, lru, cache.get(1), step.real_columns);
    cache.set(0, inputs.state);
    cache.set(1, outputs.state);
    return rest.add_to(linear_out.add_to(h, gated(projected[1], outputs.output, GateActivation::gelu_tanh)));
  }
};

// The pattern of block_types, which older configs call _block_types, repeated over the layers.
std::vector<LayerKind> layer_kinds(const Config& config) {
  auto pattern = config.get_strings("block_types");
  if (pattern.empty()) pattern = config.get_strings("_block_types");
  if (pattern.empty()) pattern = {"recurrent", "recurrent", "attention"};
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  std::vector<LayerKind> kinds;
  for (std::size_t i = 0; i < layers; ++i) {
    const std::string& type = pattern[i % pattern.size()];
    if (type == "recurrent") {
      kinds.emplace_back(Recurrent{2});
    } else if (type == "attention") {
      kinds.emplace_back(SlidingAttention{config.require_positive_int("attention_window_size")});
    } else {
      throw Error(ErrorCode::unsupported, "[make_model] blocks of type '" + type + "' are not supported");
    }
  }
  return kinds;
}

// Λ is stored; the recurrence wants c · softplus(Λ) with c = 8.
RgLruParams take_rg_lru(WeightReader& weights, const std::string& path, int heads, int width) {
  const int d = width / heads;
  weights.transform(path + ".recurrent_param", [](const mx::array& lambda) {
    return mx::multiply(mx::array(8.0f), mx::logaddexp(mx::astype(lambda, mx::float32), mx::array(0.0f)));
  });
  return {.input_gate_weight = weights.take(path + ".input_gate_weight", {heads, d, d}),
          .input_gate_bias = weights.take(path + ".input_gate_bias", {heads, d}),
          .recurrent_gate_weight = weights.take(path + ".recurrent_gate_weight", {heads, d, d}),
          .recurrent_gate_bias = weights.take(path + ".recurrent_gate_bias", {heads, d}),
          .decay = weights.take_float32(path + ".recurrent_param", {width})};
}

}  // namespace

std::unique_ptr<LanguageModel> make_recurrent_gemma(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int W = config.has("lru_width") ? config.require_positive_int("lru_width") : E;
  const int K = config.require_positive_int("conv1d_width");
  const int F = config.require_positive_int("intermediate_size") / 2;  // of gate and up together
  if (W % sizes.heads != 0) {
    throw Error(ErrorCode::corrupt_data, "[make_model] num_attention_heads must divide the width of the recurrence");
  }
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  require_activation(config, "hidden_activation", {"gelu_pytorch_tanh"});
  auto kinds = layer_kinds(config);

  WeightReader weights(files, config, options);
  const auto rope = std::make_shared<const Rope>(config.rope(config.rotary_dims(sizes.head_dim, 0.5f)));

  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    const std::string block = path + ".temporal_block";
    Norm norm = weights.take_rms_norm(path + ".temporal_pre_norm", E, kBlockNormEps, 1.0f);
    GatedMlp mlp = take_gated_mlp(weights, path + ".mlp_block", E, F, true);
    mlp.activation = GateActivation::gelu_tanh;
    ChannelBlock rest{weights.take_rms_norm(path + ".channel_pre_norm", E, kBlockNormEps, 1.0f), std::move(mlp)};
    if (std::holds_alternative<Recurrent>(kinds[i])) {
      ShortConv conv{weights.take_short_conv(block + ".conv_1d", W, K), weights.take(block + ".conv_1d.bias", {W})};
      layers.push_back(make_layer(RecurrentLayer{
          std::move(norm), weights.take_linear(block + ".linear_x", W, E, true),
          weights.take_linear(block + ".linear_y", W, E, true), weights.take_linear(block + ".linear_out", E, W, true),
          std::move(conv), take_rg_lru(weights, block + ".rg_lru", sizes.heads, W), std::move(rest)}));
    } else {
      auto attention = take_attention(weights, block, sizes, {.qkv = attention_bias, .output = true});
      attention.rope = rope;
      attention.stored_dtype = kv_dtype(options, weights.dtype());
      layers.push_back(make_layer(AttentionLayer{std::move(norm), std::move(attention), std::move(rest)}));
    }
  }
  const float eps = norm_eps(config);
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps, .norm_plus = 1.0f, .norm = "model.final_norm"});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  if (config.get_bool("embeddings_scale_by_sqrt_dim").value_or(true)) {
    ends.embedding_scale = std::sqrt(static_cast<float>(E));
  }
  if (const auto softcap = config.get_float("logits_soft_cap"); softcap && *softcap != 0.0f) {
    ends.logit_softcap = softcap;
  }
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
