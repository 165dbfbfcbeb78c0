// Llama 4: attention within chunks, every fourth layer without positions over everything, a mixture of experts beside a
// shared one. https://ai.meta.com/blog/llama-4-multimodal-intelligence. The scale of queries by position: Nakanishi,
// https://arxiv.org/abs/2501.19399. The text part of the checkpoints; their vision part is left out.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& what) { throw Error(code, "[make_model] " + what); }

// Layers without positions see arbitrarily far, so their queries grow with the logarithm of the position.
struct QueryScale {
  float floor_scale;  // positions up to here have the scale 1
  float attn_scale;

  // Of L tokens from `offset` on: [L, 1], or [B, L, 1].
  mx::array operator()(const Offset& offset, int L) const {
    const mx::array first = std::visit([](const auto& at) { return mx::array(at); }, offset);
    const mx::array steps = mx::arange(1.0, static_cast<double>(L) + 1.0, mx::float32);
    mx::array counts = mx::add(mx::expand_dims(mx::astype(first, mx::float32), -1), steps);
    counts = mx::maximum(counts, mx::array(1.0f));  // padding has positions below 0
    const mx::array floors = mx::floor(mx::divide(counts, mx::array(floor_scale)));
    const mx::array scales = mx::add(mx::multiply(mx::log1p(floors), mx::array(attn_scale)), mx::array(1.0f));
    return mx::expand_dims(scales, -1);
  }
};

// A token's experts see it scaled by what the router gives them; their answers are added up as they are.
struct ExpertsAndShared {
  Linear router;
  SwitchGlu experts;
  GatedMlp shared_expert;
  int experts_per_token;

  mx::array operator()(const mx::array& x) const {
    const Routing routing = top_k(router(x), experts_per_token, NormaliseScores::no);
    const mx::array gates = mx::astype(mx::sigmoid(mx::astype(routing.weights, mx::float32)), x.dtype());
    // [..., k, E]: each of a token's experts sees a row of its own, and is that row's only one.
    const mx::array scaled = mx::multiply(mx::expand_dims(x, -2), mx::expand_dims(gates, -1));
    const mx::array answers = mx::squeeze(experts(scaled, mx::expand_dims(routing.experts, -1)), -2);
    return mx::add(mx::sum(answers, -2), shared_expert(x));
  }
};

struct Llama4Layer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  std::optional<QueryScale> query_scale;
  RmsNorm post_attention_layernorm;
  std::variant<GatedMlp, ExpertsAndShared> feed_forward;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    AttentionCache& cache = step.attention_cache();
    Projections projected = self_attn.project(h, input_layernorm);
    if (query_scale) {
      const mx::array scales = (*query_scale)(cache.offset(), h.shape(1));
      projected.queries = mx::multiply(projected.queries, mx::astype(scales, projected.queries.dtype()));
    }
    const mx::array r = self_attn.o_proj.add_to(h, self_attn.attend(projected, cache, step.mask));
    return add_feed_forward(r, post_attention_layernorm, feed_forward);
  }
};

// What the two kinds of config differ in.
struct Variant {
  std::string prefix;  // of the weights' names
  float qk_norm_eps;
  bool norms_without_positions;  // queries and keys are normed in layers without positions too
};

// Layers with positions: where no list says otherwise, all but every fourth.
std::vector<bool> layers_with_positions(const Config& config, std::size_t layers) {
  const std::vector<bool> named = config.get_bools("no_rope_layers");  // true: the layer has positions
  if (!named.empty() && named.size() != layers) {
    fail(ErrorCode::corrupt_data,
         "no_rope_layers must name " + std::to_string(layers) + " layers, but got " + std::to_string(named.size()));
  }
  if (!named.empty()) return named;
  const int interval = config.get_int("no_rope_layer_interval").value_or(4);
  if (interval < 1) fail(ErrorCode::corrupt_data, "no_rope_layer_interval must be positive");
  std::vector<bool> with(layers);
  for (std::size_t i = 0; i < layers; ++i) with[i] = (i + 1) % static_cast<std::size_t>(interval) != 0;
  return with;
}

// Chunks as long as all positions are none.
std::vector<LayerKind> layer_kinds(const Config& config, const std::vector<bool>& with_positions) {
  std::vector<bool> chunked = with_positions;
  if (const auto types = config.get_strings("layer_types"); !types.empty()) {
    if (types.size() != chunked.size()) fail(ErrorCode::corrupt_data, "layer_types must name each layer");
    for (std::size_t i = 0; i < types.size(); ++i) {
      chunked[i] = types[i] == "chunked_attention";
      if (!chunked[i] && types[i] != "full_attention") {
        fail(ErrorCode::unsupported, "layers of type '" + types[i] + "' are not supported");
      }
    }
  }
  std::optional<int> chunk_size;
  if (config.has("attention_chunk_size")) chunk_size = config.require_positive_int("attention_chunk_size");
  const auto positions = config.get_int("max_position_embeddings");
  if (chunk_size && positions && *chunk_size >= *positions) chunk_size = {};
  std::vector<LayerKind> kinds(with_positions.size(), FullAttention{});
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (chunk_size && chunked[i]) kinds[i] = ChunkedAttention{*chunk_size};
  }
  return kinds;
}

std::optional<QueryScale> query_scale(const Config& config) {
  if (!config.get_flag("attn_temperature_tuning").value_or(false)) return {};
  const QueryScale scale{config.get_float("floor_scale").value_or(8192.0f),
                         config.get_float("attn_scale").value_or(0.1f)};
  if (!(scale.floor_scale > 0.0f)) fail(ErrorCode::corrupt_data, "floor_scale must be positive");
  return scale;
}

bool has_experts(const Config& config, std::size_t layer) {
  const int interval = config.get_int("interleave_moe_layer_step").value_or(0);
  if (interval < 1 || config.get_int("num_local_experts").value_or(0) < 1) return false;
  return (layer + 1) % static_cast<std::size_t>(interval) == 0;
}

// Original checkpoints: one matrix of gate and up for all experts, [experts, in, out], and no ".weight".
void split_fused_experts(WeightReader& weights, const std::string& path) {
  const auto put = [&](const char* name, const mx::array& matrices) {
    weights.put(path + name, mx::swapaxes(matrices, 1, 2));
  };
  if (const std::string fused = path + ".gate_up_proj"; weights.has(fused)) {
    const mx::array both = weights.release(fused);
    if (both.ndim() != 3 || both.shape(2) % 2 != 0) {
      fail(ErrorCode::corrupt_data, "weight '" + fused + "' must be [experts, in, 2 * out]");
    }
    const std::vector<mx::array> parts = mx::split(both, 2, -1);
    put(".gate_proj.weight", parts[0]);
    put(".up_proj.weight", parts[1]);
  }
  if (const std::string down = path + ".down_proj"; weights.has(down)) {
    const mx::array matrices = weights.release(down);
    if (matrices.ndim() != 3) fail(ErrorCode::corrupt_data, "weight '" + down + "' must be [experts, in, out]");
    put(".down_proj.weight", matrices);
  }
}

ExpertsAndShared take_experts(WeightReader& weights, const Config& config, const std::string& path, int E) {
  split_fused_experts(weights, path + ".experts");
  const int F = config.require_positive_int("intermediate_size");
  const auto experts = ExpertCounts::from(config, "num_local_experts", "num_experts_per_tok");
  return {.router = weights.take_linear(path + ".router", experts.all, E, false),
          .experts = weights.take_switch_glu(path + ".experts", experts.all, E, F),
          .shared_expert = take_gated_mlp(weights, path + ".shared_expert", E, F),
          .experts_per_token = experts.per_token};
}

std::unique_ptr<LanguageModel> make(const ModelFiles& files, const ModelOptions& options, const Config& outer,
                                    const Config& config, const Variant& variant) {
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  const float eps = norm_eps(config);
  const bool bias = config.get_bool("attention_bias").value_or(false);
  const bool qk_norm = config.get_bool("use_qk_norm").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});
  const auto with_positions = layers_with_positions(config, layers);
  auto kinds = layer_kinds(config, with_positions);
  const auto scale = query_scale(config);

  WeightReader weights(files, outer, options);
  drop_rotary_buffers(weights);
  weights.drop([](const std::string& name) {
    return name.find("vision_model") != std::string::npos || name.find("multi_modal_projector") != std::string::npos;
  });
  // mlx-lm's name of it.
  weights.rename(
      [](const std::string& name) { return name.starts_with("output.") ? "lm_head" + name.substr(6) : name; });
  RopeOptions rope_options = config.rope(sizes.head_dim);
  rope_options.traditional = true;
  const auto rope = std::make_shared<const Rope>(rope_options);
  // Norms that come after the rotation may as well come before it, as long as it keeps lengths.
  if (qk_norm && (rope->kernel_params() == nullptr || rope->kernel_params()->input_scale != 1.0f)) {
    fail(ErrorCode::unsupported, "use_qk_norm with a rope_scaling that changes lengths is not supported");
  }
  const RmsNorm head_norm = unweighted_rms_norm(sizes.head_dim, variant.qk_norm_eps, weights.dtype());

  std::vector<std::unique_ptr<DecoderLayer>> decoder_layers;
  for (std::size_t i = 0; i < layers; ++i) {
    const std::string path = variant.prefix + "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {bias, bias});
    if (with_positions[i]) attention.rope = rope;
    if (qk_norm && (with_positions[i] || variant.norms_without_positions)) {
      attention.q_norm = head_norm;
      attention.k_norm = head_norm;
    }
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    Llama4Layer layer{.input_layernorm = weights.take_rms_norm(path + ".input_layernorm", E, eps),
                      .self_attn = std::move(attention),
                      .query_scale = with_positions[i] ? std::nullopt : scale,
                      .post_attention_layernorm = weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
                      .feed_forward = has_experts(config, i)
                                          ? std::variant<GatedMlp, ExpertsAndShared>(
                                                take_experts(weights, config, path + ".feed_forward", E))
                                          : take_gated_mlp(weights, path + ".feed_forward", E,
                                                           config.require_positive_int("intermediate_size_mlp"))};
    decoder_layers.push_back(make_layer(std::move(layer)));
  }
  auto ends = take_decoder_ends(weights, config, {.prefix = variant.prefix, .norm_eps = eps});
  ends.layers = std::move(decoder_layers);
  ends.kinds = std::move(kinds);
  ModelInfo info = model_info(config, weights);
  info.model_type = outer.require_string("model_type");
  return make_decoder(std::move(info), weights, std::move(ends));
}

}  // namespace

std::unique_ptr<LanguageModel> make_llama4(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  return make(files, options, config, config.require_object("text_config"),
              {.prefix = "language_model.", .qk_norm_eps = 1e-6f, .norms_without_positions = false});
}

std::unique_ptr<LanguageModel> make_llama4_text(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  return make(files, options, config, config,
              {.prefix = "", .qk_norm_eps = norm_eps(config), .norms_without_positions = true});
}

}  // namespace reprise::internal
