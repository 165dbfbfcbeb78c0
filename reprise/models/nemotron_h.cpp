// Nemotron-H: a pattern of Mamba 2 layers, attention layers, feed-forward layers and mixtures of experts, one block a
// layer. No positions; feed-forward activations are squared rectifiers. NVIDIA, https://arxiv.org/abs/2504.03624.
#include <map>
#include <memory>
#include <optional>
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
#include "reprise/models/expert_router.h"
#include "reprise/models/mamba2_mixer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// So et al., https://arxiv.org/abs/2109.08668.
mx::array squared_relu(const mx::array& x) { return mx::square(mx::maximum(x, mx::array(0.0f, x.dtype()))); }

struct SquaredReluMlp {
  Linear up_proj;
  Linear down_proj;

  mx::array add_to(const mx::array& residual, const mx::array& x) const {
    return down_proj.add_to(residual, squared_relu(up_proj(x)));
  }
};

// Experts may work in a space of their own, of fewer features.
struct NemotronMoe {
  struct Latent {
    Linear in;
    Linear out;
  };

  ExpertRouter router;
  SwitchLinear fc1;
  SwitchLinear fc2;
  std::optional<Latent> latent;
  std::optional<SquaredReluMlp> shared_experts;

  mx::array add_to(const mx::array& residual, const mx::array& x) const {
    const Routing routing = router(x);
    const mx::array hidden = squared_relu(fc1(latent ? latent->in(x) : x, routing.experts));
    const mx::array routed = combine(fc2(hidden, routing.experts), routing.weights);
    const mx::array sum = shared_experts ? shared_experts->add_to(residual, x) : residual;
    return latent ? latent->out.add_to(sum, routed) : mx::add(sum, routed);
  }
};

struct NemotronHLayer {
  Norm norm;
  std::variant<Mamba2Mixer, AttentionBlock, SquaredReluMlp, NemotronMoe> mixer;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    if (const auto* mamba = std::get_if<Mamba2Mixer>(&mixer)) {
      return mamba->add_to(h, h, norm, step.recurrent_cache(), step.real_columns);
    }
    if (const auto* attention = std::get_if<AttentionBlock>(&mixer)) {
      return attention->add_to(h, h, norm, step.attention_cache(), step.mask);
    }
    const mx::array x = apply(norm, h);
    if (const auto* mlp = std::get_if<SquaredReluMlp>(&mixer)) return mlp->add_to(h, x);
    return std::get<NemotronMoe>(mixer).add_to(h, x);
  }
};

// One of "M", "*", "-" and "E" a layer.
std::string layer_pattern(const Config& config) {
  static const std::map<std::string, char> kTypes = {
      {"linear_attention", 'M'}, {"mamba", 'M'}, {"conv", 'M'}, {"full_attention", '*'},
      {"attention", '*'},        {"mlp", '-'},   {"moe", 'E'}};
  std::string pattern = config.get_string("hybrid_override_pattern").value_or("");
  if (pattern.empty()) {
    auto types = config.get_strings("layers_block_type");
    if (types.empty()) types = config.get_strings("layer_types");
    for (const std::string& type : types) {
      const auto known = kTypes.find(type);
      if (known == kTypes.end()) {
        throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + type + "' are not supported");
      }
      pattern += known->second;
    }
  }
  if (pattern.empty()) {
    throw Error(ErrorCode::corrupt_data, "[make_model] hybrid_override_pattern or layers_block_type is missing");
  }
  if (const auto unknown = pattern.find_first_not_of("M*-E"); unknown != std::string::npos) {
    throw Error(ErrorCode::unsupported,
                "[make_model] hybrid_override_pattern must be made of M, *, - and E, but got '" + pattern + "'");
  }
  return pattern;
}

std::vector<LayerKind> layer_kinds(const std::string& pattern) {
  std::vector<LayerKind> kinds;
  for (const char type : pattern) {
    kinds.push_back(type == 'M'   ? LayerKind(Recurrent{kMambaSlots})
                    : type == '*' ? LayerKind(FullAttention{})
                                  : LayerKind(Stateless{}));
  }
  return kinds;
}

Mamba2Mixer take_mamba(WeightReader& weights, const Config& config, const std::string& path, float eps) {
  const bool bias = config.get_bool("mamba_proj_bias").value_or(false);
  Mamba2Options options{.order = GateOrder::gate_then_group_norms,
                        .norm_eps = eps,
                        .in_bias = bias,
                        .out_bias = bias,
                        .conv_bias = config.get_bool("use_conv_bias").value_or(true)};
  read_step_limits(config, options);
  return take_mamba2_mixer(weights, path,
                           {.hidden_size = config.require_positive_int("hidden_size"),
                            .heads = config.require_positive_int("mamba_num_heads"),
                            .head_dim = config.require_positive_int("mamba_head_dim"),
                            .groups = config.require_positive_int("n_groups"),
                            .states = config.require_positive_int("ssm_state_size"),
                            .conv_width = config.require_positive_int("conv_kernel")},
                           options);
}

SquaredReluMlp take_mlp(WeightReader& weights, const Config& config, const std::string& path, int size) {
  const int E = config.require_positive_int("hidden_size");
  const bool bias = config.get_bool("mlp_bias").value_or(false);
  return {weights.take_linear(path + ".up_proj", size, E, bias),
          weights.take_linear(path + ".down_proj", E, size, bias)};
}

NemotronMoe take_moe(WeightReader& weights, const Config& config, const std::string& path) {
  const int E = config.require_positive_int("hidden_size");
  const int F = config.require_positive_int("moe_intermediate_size");
  const auto experts = ExpertCounts::from(config, "n_routed_experts", "num_experts_per_tok");
  // Original checkpoints have a matrix an expert.
  for (const auto& [from, to] : {std::pair{".up_proj", ".fc1"}, std::pair{".down_proj", ".fc2"}}) {
    weights.stack_experts(
        experts.all, [&, part = from](int expert) { return path + ".experts." + std::to_string(expert) + part; },
        path + ".switch_mlp" + to);
  }
  const auto latent_size = config.get_int("moe_latent_size");
  const int in = latent_size.value_or(E);
  const bool normalises = config.get_bool("norm_topk_prob").value_or(false) && experts.per_token > 1;
  ExpertRouter router{.gate = weights.take_linear(path + ".gate", experts.all, E, false),
                      .scores = ExpertRouter::Scores::sigmoid,
                      .experts_per_token = experts.per_token,
                      .limit = group_limit(config, experts, /*members=*/2),
                      .correction_bias = weights.take_float32(path + ".gate.e_score_correction_bias", {experts.all}),
                      .normalise = normalises ? NormaliseScores::yes : NormaliseScores::no,
                      .scaling_factor = config.get_float("routed_scaling_factor").value_or(1.0f)};
  NemotronMoe moe{.router = std::move(router),
                  .fc1 = weights.take_switch_linear(path + ".switch_mlp.fc1", experts.all, F, in),
                  .fc2 = weights.take_switch_linear(path + ".switch_mlp.fc2", experts.all, in, F),
                  .latent = std::nullopt,
                  .shared_experts = std::nullopt};
  if (latent_size) {
    const bool bias = config.get_bool("mlp_bias").value_or(false);
    moe.latent = NemotronMoe::Latent{weights.take_linear(path + ".fc1_latent_proj", in, E, bias),
                                     weights.take_linear(path + ".fc2_latent_proj", E, in, bias)};
  }
  if (config.get_int("n_shared_experts").value_or(0) > 0) {
    moe.shared_experts = take_mlp(weights, config, path + ".shared_experts",
                                  config.require_positive_int("moe_shared_expert_intermediate_size"));
  }
  return moe;
}

}  // namespace

std::unique_ptr<LanguageModel> make_nemotron_h(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const std::string pattern = layer_pattern(config);
  const float eps = norm_eps(config, "layer_norm_epsilon", 1e-5f);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  require_activation(config, "mlp_hidden_act", {"relu2"});
  require_activation(config, "mamba_hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  weights.drop([](const std::string& name) { return name.starts_with("mtp."); });
  const auto take_mixer = [&](char type, const std::string& path) -> decltype(NemotronHLayer::mixer) {
    if (type == 'M') return take_mamba(weights, config, path, eps);
    if (type == '-') return take_mlp(weights, config, path, config.require_positive_int("intermediate_size"));
    if (type == 'E') return take_moe(weights, config, path);
    auto attention = take_attention(weights, path, sizes, {attention_bias, attention_bias});
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    return attention;
  };
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const std::string path = "backbone.layers." + std::to_string(i);
    layers.push_back(make_layer(NemotronHLayer{weights.take_rms_norm(path + ".norm", sizes.hidden_size, eps),
                                               take_mixer(pattern[i], path + ".mixer")}));
  }
  auto ends = take_decoder_ends(weights, config,
                                {.norm_eps = eps, .embed_tokens = "backbone.embeddings", .norm = "backbone.norm_f"});
  ends.layers = std::move(layers);
  ends.kinds = layer_kinds(pattern);
  return make_decoder(model_info(config, weights, static_cast<int>(pattern.size())), weights, std::move(ends));
}

}  // namespace reprise::internal
