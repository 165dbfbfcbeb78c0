// LFM2, and LFM2-MoE: gated short convolutions, and attention here and there. Liquid AI,
// https://arxiv.org/abs/2511.23404.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
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
#include "reprise/nn/moe.h"
#include "reprise/nn/short_conv.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Sigmoid routing: a bias takes part in the choice of experts, not in their weights.
struct Experts {
  Linear gate;
  std::optional<mx::array> expert_bias;  // [experts]
  int per_token;
  NormaliseScores normalise;
  float scaling_factor;
  SwitchGlu switch_mlp;

  mx::array operator()(const mx::array& x) const {
    const mx::array scores = mx::sigmoid(gate(x));
    const mx::array order = expert_bias ? mx::add(scores, *expert_bias) : scores;
    Routing routing = top_k(scores, order, per_token, NormaliseScores::no);
    const auto number = [&](float value) { return mx::array(value, routing.weights.dtype()); };
    if (normalise == NormaliseScores::yes) {
      const mx::array sum = mx::sum(routing.weights, -1, /*keepdims=*/true);
      routing.weights = mx::divide(routing.weights, mx::add(sum, number(1e-6f)));
    }
    routing.weights = mx::multiply(routing.weights, number(scaling_factor));
    return switch_mlp(x, routing);
  }
};

// What follows the operator of every layer.
struct FeedForward {
  RmsNorm ffn_norm;
  std::variant<GatedMlp, Experts> feed_forward;

  mx::array add_to(const mx::array& h) const { return add_feed_forward(h, ffn_norm, feed_forward); }
};

struct AttentionLayer {
  Norm operator_norm;
  AttentionBlock self_attn;
  FeedForward rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    return rest.add_to(self_attn.add_to(h, h, operator_norm, step.attention_cache(), step.mask));
  }
};

// h + out_proj(C · conv(B · x)), where B, C and x are projections of the normed h.
struct ConvLayer {
  Norm operator_norm;
  std::vector<Linear> in_projs;  // of B, C and x
  ShortConv conv;
  Linear out_proj;
  FeedForward rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    ArraysCache& cache = step.recurrent_cache();
    const auto projected = project(h, operator_norm, {in_projs[0], in_projs[1], in_projs[2]});
    const auto result = conv(mx::multiply(projected[0], projected[2]), cache.get(0), step.real_columns);
    cache.set(0, result.state);
    return rest.add_to(out_proj.add_to(h, mx::multiply(projected[1], result.output)));
  }
};

std::vector<LayerKind> layer_kinds(const Config& config) {
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  const std::vector<int> full = config.get_ints("full_attn_idxs");
  const std::vector<std::string> types = config.get_strings("layer_types");
  if (full.empty() && types.size() != layers) {
    throw Error(ErrorCode::corrupt_data,
                "[make_model] layer_types must name " + std::to_string(layers) + " layers where full_attn_idxs is not");
  }
  std::vector<LayerKind> kinds;
  for (std::size_t i = 0; i < layers; ++i) {
    const bool is_attention = full.empty() ? types[i] == "full_attention"
                                           : std::find(full.begin(), full.end(), static_cast<int>(i)) != full.end();
    if (full.empty() && !is_attention && types[i] != "conv") {
      throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + types[i] + "' are not supported");
    }
    kinds.push_back(is_attention ? LayerKind(FullAttention{}) : LayerKind(Recurrent{1}));
  }
  return kinds;
}

// Some configs give the width before it is cut to two thirds and rounded up.
int feed_forward_size(const Config& config) {
  const int size = config.require_positive_int(config.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size");
  if (!config.get_bool("block_auto_adjust_ff_dim").value_or(false)) return size;
  const double multiplier = config.get_float("block_ffn_dim_multiplier").value_or(1.0f);
  const int multiple = config.require_positive_int("block_multiple_of");
  const double rounded = std::ceil(std::floor(multiplier * std::floor(2.0 * size / 3.0)) / multiple) * multiple;
  if (!(rounded >= 1.0 && rounded < 1e9)) {
    throw Error(ErrorCode::corrupt_data, "[make_model] block_ff_dim and what adjusts it must give a size");
  }
  return static_cast<int>(rounded);
}

class Loader {
 public:
  Loader(const Config& config, const ModelOptions& options, WeightReader& weights)
      : config_(config),
        weights_(weights),
        sizes_(AttentionSizes::from(config)),
        conv_width_(config.require_positive_int("conv_L_cache")),
        conv_bias_(config.get_bool("conv_bias").value_or(false)),
        eps_(norm_eps(config, "norm_eps", 1e-5f)),
        kv_dtype_(kv_dtype(options, weights.dtype())) {
    rope_ = std::make_shared<const Rope>(config.rope(sizes_.head_dim, {.base_otherwise = 1e6f}));
  }

  float eps() const { return eps_; }

  std::unique_ptr<DecoderLayer> take_layer(int i, const LayerKind& kind) {
    const std::string path = "model.layers." + std::to_string(i);
    const int E = sizes_.hidden_size;
    Norm norm = weights_.take_rms_norm(path + ".operator_norm", E, eps_);
    if (!std::holds_alternative<Recurrent>(kind)) {
      return make_layer(AttentionLayer{std::move(norm), take_attention(path + ".self_attn"), take_rest(i, path)});
    }
    ShortConv conv{weights_.take_short_conv(path + ".conv.conv", E, conv_width_)};
    if (conv_bias_) conv.bias = weights_.take(path + ".conv.conv.bias", {E});
    return make_layer(ConvLayer{std::move(norm),
                                weights_.take_linears(path + ".conv.in_proj", {E, E, E}, E, conv_bias_), conv,
                                weights_.take_linear(path + ".conv.out_proj", E, E, conv_bias_), take_rest(i, path)});
  }

 private:
  AttentionBlock take_attention(const std::string& path) {
    const int E = sizes_.hidden_size;
    const int D = sizes_.head_dim;
    return {.sizes = sizes_,
            .q_proj = weights_.take_linear(path + ".q_proj", sizes_.heads * D, E, false),
            .k_proj = weights_.take_linear(path + ".k_proj", sizes_.kv_heads * D, E, false),
            .v_proj = weights_.take_linear(path + ".v_proj", sizes_.kv_heads * D, E, false),
            .o_proj = weights_.take_linear(path + ".out_proj", E, sizes_.heads * D, false),
            .scale = 1.0f / std::sqrt(static_cast<float>(D)),
            .rope = rope_,
            .q_norm = weights_.take_rms_norm(path + ".q_layernorm", D, eps_),
            .k_norm = weights_.take_rms_norm(path + ".k_layernorm", D, eps_),
            .stored_dtype = kv_dtype_};
  }

  FeedForward take_rest(int i, const std::string& path) {
    const int E = sizes_.hidden_size;
    RmsNorm norm = weights_.take_rms_norm(path + ".ffn_norm", E, eps_);
    const std::string mlp = path + ".feed_forward";
    if (!config_.has("num_experts")) {
      const int F = feed_forward_size(config_);
      return {std::move(norm), GatedMlp{.gate_proj = weights_.take_linear(mlp + ".w1", F, E, false),
                                        .up_proj = weights_.take_linear(mlp + ".w3", F, E, false),
                                        .down_proj = weights_.take_linear(mlp + ".w2", E, F, false)}};
    }
    if (i < config_.get_int("num_dense_layers").value_or(0)) {
      return {std::move(norm), take_gated_mlp(weights_, mlp, E, config_.require_positive_int("intermediate_size"))};
    }
    return {std::move(norm), take_experts(mlp)};
  }

  Experts take_experts(const std::string& path) {
    const int E = sizes_.hidden_size;
    const auto experts = ExpertCounts::from(config_, "num_experts", "num_experts_per_tok");
    stack_experts_of_glu(weights_, path, experts.all);
    std::optional<mx::array> bias;
    if (config_.get_bool("use_expert_bias").value_or(false)) bias = weights_.take(path + ".expert_bias", {experts.all});
    const bool normalise = config_.get_bool("norm_topk_prob").value_or(false);
    return {.gate = weights_.take_linear(path + ".gate", experts.all, E, false),
            .expert_bias = std::move(bias),
            .per_token = experts.per_token,
            .normalise = normalise ? NormaliseScores::yes : NormaliseScores::no,
            .scaling_factor = config_.get_float("routed_scaling_factor").value_or(1.0f),
            .switch_mlp = weights_.take_switch_glu(path + ".switch_mlp", experts.all, E,
                                                   config_.require_positive_int("moe_intermediate_size"))};
  }

  const Config& config_;
  WeightReader& weights_;
  AttentionSizes sizes_;
  int conv_width_;
  bool conv_bias_;
  float eps_;
  mx::Dtype kv_dtype_;
  std::shared_ptr<const Rope> rope_;
};

// mlx-lm calls w1, w2 and w3 by what they are where there are experts.
std::string name_of_projection(std::string name) {
  const std::pair<const char*, const char*> names[] = {
      {".w1.", ".gate_proj."}, {".w2.", ".down_proj."}, {".w3.", ".up_proj."}};
  for (const auto& [from, to] : names) {
    if (const auto at = name.find(from); at != std::string::npos) return name.replace(at, 4, to);
  }
  return name;
}

}  // namespace

std::unique_ptr<LanguageModel> make_lfm2(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  auto kinds = layer_kinds(config);
  WeightReader weights(files, config, options);
  if (config.has("num_experts")) weights.rename(name_of_projection);
  Loader loader(config, options, weights);
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (const LayerKind& kind : kinds) layers.push_back(loader.take_layer(static_cast<int>(layers.size()), kind));
  auto ends = take_decoder_ends(weights, config, {.norm_eps = loader.eps(), .norm = "model.embedding_norm"});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
