// Qwen3-Next and Qwen3.5: gated delta nets, every few layers gated attention, and experts beside one that all tokens
// share. Yang et al., https://arxiv.org/abs/2412.06464; Qiu et al., https://arxiv.org/abs/2505.06708.
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
#include "reprise/models/gated_delta_block.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Experts by the softmax of a router, and one for all tokens, which a gate of its own weighs.
struct SharedExpertMoe {
  Linear gate;
  SwitchGlu switch_mlp;
  int per_token;
  NormaliseScores normalise;
  Linear shared_expert_gate;
  GatedMlp shared_expert;

  mx::array operator()(const mx::array& x) const {
    const Routing routing = top_k_of_softmax(gate(x), per_token, normalise);
    const mx::array shared = mx::multiply(mx::sigmoid(shared_expert_gate(x)), shared_expert(x));
    return mx::add(switch_mlp(x, routing), shared);
  }
};

// What follows the mixer of every layer.
struct FeedForward {
  RmsNorm post_attention_layernorm;
  std::variant<GatedMlp, SharedExpertMoe> mlp;

  mx::array add_to(const mx::array& h) const { return add_feed_forward(h, post_attention_layernorm, mlp); }
};

struct GatedDeltaLayer {
  Norm input_layernorm;
  GatedDeltaBlock linear_attn;
  FeedForward rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    return rest.add_to(linear_attn.add_to(h, input_layernorm, step.recurrent_cache(), step.real_columns));
  }
};

// Attention whose output a gate, made of the same input, closes feature by feature.
struct GatedAttentionLayer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  Linear gate_proj;
  FeedForward rest;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array gate = project(h, input_layernorm, {gate_proj})[0];
    const auto projections = self_attn.project(h, input_layernorm);
    const mx::array attended = self_attn.attend(projections, step.attention_cache(), step.mask);
    return rest.add_to(self_attn.o_proj.add_to(h, mx::multiply(attended, mx::sigmoid(gate))));
  }
};

[[noreturn]] void corrupt(const std::string& what) { throw Error(ErrorCode::corrupt_data, "[make_model] " + what); }

std::vector<LayerKind> layer_kinds(const Config& config) {
  const auto layers = static_cast<std::size_t>(config.require_positive_int("num_hidden_layers"));
  const bool has_interval = config.has("full_attention_interval");
  const int interval = has_interval ? config.require_positive_int("full_attention_interval") : 4;
  const std::vector<std::string> types = config.get_strings("layer_types");
  if (!types.empty() && types.size() != layers) corrupt("layer_types must name every layer");
  std::vector<LayerKind> kinds;
  for (std::size_t i = 0; i < layers; ++i) {
    const bool is_full = types.empty() ? (static_cast<int>(i) + 1) % interval == 0 : types[i] == "full_attention";
    if (!types.empty() && !is_full && types[i] != "linear_attention") {
      throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + types[i] + "' are not supported");
    }
    kinds.push_back(is_full ? LayerKind(FullAttention{}) : LayerKind(Recurrent{GatedDeltaBlock::kSlots}));
  }
  return kinds;
}

// What the two families mean where their configs say nothing, and how their tensors are named.
struct Family {
  std::string prefix;      // of all names
  bool normalises_scores;  // of chosen experts
  float rotary_factor;
  float rope_theta;
};

class Loader {
 public:
  Loader(const Config& config, const Family& family, const ModelOptions& options, WeightReader& weights)
      : config_(config),
        weights_(weights),
        family_(family),
        sizes_(AttentionSizes::from(config)),
        delta_sizes_(GatedDeltaSizes::from(config)),
        eps_(norm_eps(config)),
        attention_bias_(config.get_bool("attention_bias").value_or(false)),
        kv_dtype_(kv_dtype(options, weights.dtype())) {
    require_activation(config, "hidden_act", {"silu", "swish"});
    if (!config.get_bool("attn_output_gate").value_or(true)) {
      throw Error(ErrorCode::unsupported, "[make_model] attention without attn_output_gate is not supported");
    }
    // An original checkpoint: convolutions as [channels, 1, width], norms as w - 1.
    const auto names = weights.names();
    const bool is_original = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      if (!name.ends_with(".conv1d.weight")) return false;
      const mx::Shape conv = weights.shape_of(name);
      return conv.size() == 3 && conv[2] != 1;
    });
    norm_plus_ = is_original ? 1.0f : 0.0f;
    rope_ = std::make_shared<const Rope>(
        config.rope(config.rotary_dims(sizes_.head_dim, family.rotary_factor), {.base_otherwise = family.rope_theta}));
  }

  std::unique_ptr<DecoderLayer> take_layer(int i, const LayerKind& kind) {
    const std::string path = family_.prefix + "model.layers." + std::to_string(i);
    Norm norm = take_norm(path + ".input_layernorm", sizes_.hidden_size);
    if (std::holds_alternative<Recurrent>(kind)) {
      auto delta = take_gated_delta(weights_, path + ".linear_attn", delta_sizes_, eps_);
      return make_layer(GatedDeltaLayer{std::move(norm), std::move(delta), take_rest(i, path)});
    }
    return take_attention_layer(std::move(norm), path + ".self_attn", take_rest(i, path));
  }

  DecoderParts take_ends() {
    return take_decoder_ends(weights_, config_, {.prefix = family_.prefix, .norm_eps = eps_, .norm_plus = norm_plus_});
  }

 private:
  RmsNorm take_norm(const std::string& path, int size) { return weights_.take_rms_norm(path, size, eps_, norm_plus_); }

  // q_proj holds each head's queries and then its gate.
  std::unique_ptr<DecoderLayer> take_attention_layer(Norm norm, const std::string& path, FeedForward rest) {
    const int E = sizes_.hidden_size;
    const int D = sizes_.head_dim;
    const int q = sizes_.heads * D;
    const int kv = sizes_.kv_heads * D;
    ungroup_rows(weights_, path + ".q_proj", sizes_.heads, {D, D});
    auto q_and_gate = weights_.take_linears(path + ".q_proj", {q, q}, E, attention_bias_);
    AttentionBlock attention{.sizes = sizes_,
                             .q_proj = std::move(q_and_gate[0]),
                             .k_proj = weights_.take_linear(path + ".k_proj", kv, E, attention_bias_),
                             .v_proj = weights_.take_linear(path + ".v_proj", kv, E, attention_bias_),
                             .o_proj = weights_.take_linear(path + ".o_proj", E, q, attention_bias_),
                             .scale = 1.0f / std::sqrt(static_cast<float>(D)),
                             .rope = rope_,
                             .q_norm = take_norm(path + ".q_norm", D),
                             .k_norm = take_norm(path + ".k_norm", D),
                             .stored_dtype = kv_dtype_};
    return make_layer(
        GatedAttentionLayer{std::move(norm), std::move(attention), std::move(q_and_gate[1]), std::move(rest)});
  }

  bool has_experts(int layer) const {
    const auto dense = config_.get_ints("mlp_only_layers");
    const int step = config_.get_int("decoder_sparse_step").value_or(1);
    if (step < 1) corrupt("decoder_sparse_step must be positive");
    return config_.get_int("num_experts").value_or(0) > 0 &&
           std::find(dense.begin(), dense.end(), layer) == dense.end() && (layer + 1) % step == 0;
  }

  FeedForward take_rest(int i, const std::string& path) {
    RmsNorm norm = take_norm(path + ".post_attention_layernorm", sizes_.hidden_size);
    if (has_experts(i)) return {std::move(norm), take_moe(path + ".mlp")};
    const int F = config_.require_positive_int("intermediate_size");
    return {std::move(norm), take_gated_mlp(weights_, path + ".mlp", sizes_.hidden_size, F)};
  }

  SharedExpertMoe take_moe(const std::string& path) {
    const int E = sizes_.hidden_size;
    const int F = config_.require_positive_int("moe_intermediate_size");
    const auto experts = ExpertCounts::from(config_, "num_experts", "num_experts_per_tok");
    stack_experts_of_glu(weights_, path, experts.all);
    split_experts(path, F);
    const bool normalise = config_.get_bool("norm_topk_prob").value_or(family_.normalises_scores);
    return {.gate = weights_.take_linear(path + ".gate", experts.all, E, false),
            .switch_mlp = weights_.take_switch_glu(path + ".switch_mlp", experts.all, E, F),
            .per_token = experts.per_token,
            .normalise = normalise ? NormaliseScores::yes : NormaliseScores::no,
            .shared_expert_gate = weights_.take_linear(path + ".shared_expert_gate", 1, E, false),
            .shared_expert = take_gated_mlp(weights_, path + ".shared_expert", E,
                                            config_.require_positive_int("shared_expert_intermediate_size"))};
  }

  // Some original checkpoints store all experts in one tensor, with gate and up as one.
  void split_experts(const std::string& path, int F) {
    if (!weights_.has(path + ".experts.gate_up_proj")) return;
    const mx::array both = weights_.release(path + ".experts.gate_up_proj");
    if (both.ndim() != 3 || both.shape(1) != 2 * F) corrupt("'" + path + ".experts.gate_up_proj' has a wrong shape");
    const std::string to = path + ".switch_mlp.";
    const int n = both.shape(0);
    weights_.put(to + "gate_proj.weight", mx::slice(both, {0, 0, 0}, {n, F, both.shape(2)}));
    weights_.put(to + "up_proj.weight", mx::slice(both, {0, F, 0}, both.shape()));
    weights_.put(to + "down_proj.weight", weights_.release(path + ".experts.down_proj"));
  }

  const Config& config_;
  WeightReader& weights_;
  Family family_;
  AttentionSizes sizes_;
  GatedDeltaSizes delta_sizes_;
  float eps_;
  bool attention_bias_;
  mx::Dtype kv_dtype_;
  float norm_plus_ = 0.0f;
  std::shared_ptr<const Rope> rope_;
};

std::unique_ptr<LanguageModel> make(const std::string& model_type, const Config& config, const Family& family,
                                    const ModelOptions& options, WeightReader& weights) {
  weights.drop([](const std::string& name) { return name.find("mtp.") != std::string::npos; });
  auto kinds = layer_kinds(config);
  Loader loader(config, family, options, weights);
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (const LayerKind& kind : kinds) layers.push_back(loader.take_layer(static_cast<int>(layers.size()), kind));
  auto ends = loader.take_ends();
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  ModelInfo info = model_info(config, weights);
  info.model_type = model_type;
  return make_decoder(std::move(info), weights, std::move(ends));
}

}  // namespace

std::unique_ptr<LanguageModel> make_qwen3_next(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  WeightReader weights(files, config, options);
  const Family family{.prefix = "", .normalises_scores = false, .rotary_factor = 0.25f, .rope_theta = 10000.0f};
  return make("qwen3_next", config, family, options, weights);
}

// A text model inside one that also sees; what sees is left out.
std::unique_ptr<LanguageModel> make_qwen3_5(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  WeightReader weights(files, config, options);
  weights.drop(
      [](const std::string& name) { return name.starts_with("vision_tower") || name.starts_with("model.visual"); });
  const std::string original = "model.language_model.";
  weights.rename([&](const std::string& name) {
    if (name.starts_with(original)) return "language_model.model." + name.substr(original.size());
    return name.starts_with("language_model.") ? name : "language_model." + name;
  });
  const Family family{
      .prefix = "language_model.", .normalises_scores = true, .rotary_factor = 0.25f, .rope_theta = 100000.0f};
  const Config text = config.get_object("text_config").value_or(config);
  return make(config.require_string("model_type"), text, family, options, weights);
}

}  // namespace reprise::internal
