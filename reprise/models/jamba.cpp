// Jamba: blocks of Mamba layers with an attention layer among them, and mixtures of experts in place of some of the
// feed-forward blocks. No positions: the recurrence tells them. Lieber et al., https://arxiv.org/abs/2403.19887.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/mamba_mixer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct JambaMoe {
  Linear router;
  SwitchGlu switch_mlp;
  int experts_per_token;

  mx::array operator()(const mx::array& x) const {
    return switch_mlp(x, softmax_of_top_k(router(x), experts_per_token));
  }
};

struct JambaLayer {
  Norm input_layernorm;
  std::variant<MambaMixer, AttentionBlock> mixer;
  RmsNorm pre_ff_layernorm;
  std::variant<GatedMlp, JambaMoe> feed_forward;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const auto* mamba = std::get_if<MambaMixer>(&mixer);
    const mx::array r = mamba != nullptr ? mamba->add_to(h, input_layernorm, step.recurrent_cache(), step.real_columns)
                                         : std::get<AttentionBlock>(mixer).add_to(h, h, input_layernorm,
                                                                                  step.attention_cache(), step.mask);
    return add_feed_forward(r, pre_ff_layernorm, feed_forward);
  }
};

// Layers i with i % period = offset.
struct EveryPeriod {
  int period;
  int offset;

  static EveryPeriod from(const Config& config, const std::string& name) {
    return {config.require_positive_int(name + "_period"), config.get_int(name + "_offset").value_or(0)};
  }
  bool has(int layer) const { return layer % period == offset; }
};

std::vector<LayerKind> layer_kinds(const Config& config) {
  const int num_layers = config.require_positive_int("num_hidden_layers");
  const auto types = config.get_strings("layers_block_type");
  std::vector<LayerKind> kinds;
  if (types.empty()) {
    const auto attends = EveryPeriod::from(config, "attn_layer");
    for (int i = 0; i < num_layers; ++i) {
      kinds.push_back(attends.has(i) ? LayerKind(FullAttention{}) : LayerKind(Recurrent{kMambaSlots}));
    }
    return kinds;
  }
  for (const std::string& type : types) {
    if (type != "attention" && type != "mamba") {
      throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + type + "' are not supported");
    }
    kinds.push_back(type == "attention" ? LayerKind(FullAttention{}) : LayerKind(Recurrent{kMambaSlots}));
  }
  if (kinds.size() != static_cast<std::size_t>(num_layers)) {
    throw Error(ErrorCode::corrupt_data, "[make_model] layers_block_type must name " + std::to_string(num_layers) +
                                             " layers, but got " + std::to_string(kinds.size()));
  }
  return kinds;
}

MambaSizes mamba_sizes(const Config& config) {
  const int E = config.require_positive_int("hidden_size");
  const std::int64_t expand = config.require_positive_int("mamba_expand");
  return {.hidden_size = E,
          .channels = checked_size(expand * E),
          .states = checked_size(config.require_positive_int("mamba_d_state")),
          .step_rank = step_rank(config, "mamba_dt_rank", E),
          .conv_width = config.require_positive_int("mamba_d_conv")};
}

MambaMixer take_mixer(WeightReader& weights, const std::string& path, const Config& config, float eps) {
  const MambaSizes sizes = mamba_sizes(config);
  MambaMixer mixer = take_mamba_mixer(weights, path, sizes,
                                      {.projections = config.get_bool("mamba_proj_bias").value_or(false),
                                       .conv = config.get_bool("mamba_conv_bias").value_or(true)});
  mixer.step_norm = weights.take_rms_norm(path + ".dt_layernorm", sizes.step_rank, eps);
  mixer.b_norm = weights.take_rms_norm(path + ".b_layernorm", sizes.states, eps);
  mixer.c_norm = weights.take_rms_norm(path + ".c_layernorm", sizes.states, eps);
  return mixer;
}

struct ExpertSizes {
  int experts;
  int per_token;
  EveryPeriod layers;
};

ExpertSizes expert_sizes(const Config& config) {
  ExpertSizes sizes{
      config.get_int("num_experts").value_or(1), config.get_int("num_experts_per_tok").value_or(1), {1, 0}};
  if (sizes.per_token < 1 || sizes.per_token > sizes.experts) {
    throw Error(ErrorCode::corrupt_data, "[make_model] num_experts_per_tok must lie in [1, num_experts], but got " +
                                             std::to_string(sizes.per_token) + " of " + std::to_string(sizes.experts));
  }
  if (sizes.experts > 1) sizes.layers = EveryPeriod::from(config, "expert_layer");
  return sizes;
}

JambaMoe take_moe(WeightReader& weights, const std::string& path, int hidden_size, int size, const ExpertSizes& sizes) {
  stack_experts_of_glu(weights, path, sizes.experts);
  return {.router = weights.take_linear(path + ".router", sizes.experts, hidden_size, false),
          .switch_mlp = weights.take_switch_glu(path + ".switch_mlp", sizes.experts, hidden_size, size),
          .experts_per_token = sizes.per_token};
}

}  // namespace

std::unique_ptr<LanguageModel> make_jamba(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config);
  const ExpertSizes experts = expert_sizes(config);
  require_activation(config, "hidden_act", {"silu", "swish"});
  auto kinds = layer_kinds(config);

  WeightReader weights(files, config, options);
  const auto take_mixing = [&](const LayerKind& kind, const std::string& path) -> decltype(JambaLayer::mixer) {
    if (std::holds_alternative<Recurrent>(kind)) return take_mixer(weights, path + ".mamba", config, eps);
    auto attention = take_attention(weights, path + ".self_attn", sizes);
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    return attention;
  };
  const auto take_feed_forward = [&](int layer, const std::string& path) -> decltype(JambaLayer::feed_forward) {
    if (experts.experts > 1 && experts.layers.has(layer)) return take_moe(weights, path, E, F, experts);
    return take_gated_mlp(weights, path, E, F);
  };
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    layers.push_back(
        make_layer(JambaLayer{.input_layernorm = weights.take_rms_norm(path + ".input_layernorm", E, eps),
                              .mixer = take_mixing(kinds[i], path),
                              .pre_ff_layernorm = weights.take_rms_norm(path + ".pre_ff_layernorm", E, eps),
                              .feed_forward = take_feed_forward(static_cast<int>(i), path + ".feed_forward")}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps, .norm = "model.final_layernorm"});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
