// Falcon-H1: attention and Mamba 2 side by side in every layer, on the same normed input.
// Zuo et al., https://arxiv.org/abs/2507.22448.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/mamba2_mixer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct FalconH1Layer {
  Norm input_layernorm;
  Mamba2Mixer mamba;
  AttentionBlock self_attn;
  RmsNorm pre_ff_layernorm;
  GatedMlp feed_forward;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array recurred = mamba.add_to(h, h, input_layernorm, step.recurrent_cache(), step.real_columns);
    const mx::array r = self_attn.add_to(recurred, h, input_layernorm, step.attention_cache(), step.mask);
    return feed_forward.add_to(r, pre_ff_layernorm, r);
  }
};

Mamba2Sizes mamba_sizes(const Config& config) {
  const Mamba2Sizes sizes{.hidden_size = config.require_positive_int("hidden_size"),
                          .heads = config.require_positive_int("mamba_n_heads"),
                          .head_dim = config.require_positive_int("mamba_d_head"),
                          .groups = config.require_positive_int("mamba_n_groups"),
                          .states = config.require_positive_int("mamba_d_state"),
                          .conv_width = config.require_positive_int("mamba_d_conv")};
  sizes.check();
  if (config.get_int("mamba_d_ssm").value_or(sizes.channels()) != sizes.channels()) {
    throw Error(ErrorCode::corrupt_data, "[make_model] mamba_d_ssm must be mamba_n_heads times mamba_d_head");
  }
  return sizes;
}

Mamba2Options mamba_options(const Config& config, float eps) {
  const bool norm_before_gate = config.get_bool("mamba_norm_before_gate").value_or(false);
  Mamba2Options options{.order = norm_before_gate ? GateOrder::norm_then_gate : GateOrder::gate_then_norm,
                        .norm_eps = eps,
                        .in_bias = config.get_bool("mamba_proj_bias").value_or(false),
                        .out_bias = config.get_bool("projectors_bias").value_or(false),
                        .conv_bias = config.get_bool("mamba_conv_bias").value_or(true)};
  if (!config.get_bool("mamba_rms_norm").value_or(false)) options.order = GateOrder::gate_only;
  return options;
}

// `count` numbers; ones when the config has none.
std::vector<float> multipliers(const Config& config, const std::string& key, std::size_t count) {
  auto values = config.get_floats(key);
  if (values.empty()) return std::vector<float>(count, 1.0f);
  if (values.size() != count) {
    throw Error(ErrorCode::corrupt_data, "[make_model] " + key + " must have " + std::to_string(count) + " numbers");
  }
  return values;
}

// The config multiplies what goes into and comes out of projections; stored by mlx-lm, the projections have it in them.
// As there, key_multiplier is not used.
class Multipliers {
 public:
  Multipliers(const Config& config, const Mamba2Sizes& sizes) {
    const auto one = [&](const char* key) { return config.get_float(key).value_or(1.0f); };
    const auto mlp = multipliers(config, "mlp_multipliers", 2);
    const float attention_in = one("attention_in_multiplier");
    by_ending_ = {{"embed_tokens.weight", one("embedding_multiplier")},
                  {"lm_head.weight", one("lm_head_multiplier")},
                  {"q_proj.weight", attention_in},
                  {"k_proj.weight", attention_in},
                  {"o_proj.weight", one("attention_out_multiplier")},
                  {"out_proj.weight", one("ssm_out_multiplier")},
                  {"gate_proj.weight", mlp[0]},
                  {"down_proj.weight", mlp[1]}};
    const auto parts = multipliers(config, "ssm_multipliers", 5);
    const int rows[] = {sizes.channels(), sizes.channels(), sizes.maps(), sizes.maps(), sizes.heads};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      in_proj_.insert(in_proj_.end(), static_cast<std::size_t>(rows[i]), parts[i] * one("ssm_in_multiplier"));
    }
  }

  void fold_into(WeightReader& weights) const {
    for (const std::string& name : weights.names()) {
      if (name.ends_with("mamba.in_proj.weight")) {
        multiply(weights, name, mx::array(in_proj_.begin(), {static_cast<int>(in_proj_.size()), 1}, mx::float32));
      }
      for (const auto& [ending, factor] : by_ending_) {
        if (name.ends_with("." + ending) || name == ending) multiply(weights, name, mx::array(factor));
      }
    }
  }

 private:
  static void multiply(WeightReader& weights, const std::string& name, const mx::array& factor) {
    const mx::array weight = weights.release(name);
    if (factor.ndim() > 0 && (weight.ndim() != 2 || weight.shape(0) != factor.shape(0))) {
      throw Error(ErrorCode::corrupt_data,
                  "[make_model] weight '" + name + "' must have " + std::to_string(factor.shape(0)) + " rows");
    }
    weights.put(name, mx::astype(mx::multiply(mx::astype(weight, mx::float32), factor), weight.dtype()));
  }

  std::vector<std::pair<std::string, float>> by_ending_;
  std::vector<float> in_proj_;  // a factor a row
};

// Original checkpoints keep the convolution's width last.
bool is_original(const WeightReader& weights) {
  const mx::Shape conv = weights.shape_of("model.layers.0.mamba.conv1d.weight");
  return conv.size() == 3 && conv[2] > conv[1];
}

}  // namespace

std::unique_ptr<LanguageModel> make_falcon_h1(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const Mamba2Sizes recurrent_sizes = mamba_sizes(config);
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "rms_norm_eps", 1e-5f);
  const Mamba2Options recurrent_options = mamba_options(config, eps);
  const bool attention_bias = config.get_bool("attention_bias").value_or(false);
  const bool mlp_bias = config.get_bool("mlp_bias").value_or(false);
  require_activation(config, "hidden_act", {"silu", "swish"});

  WeightReader weights(files, config, options);
  if (is_original(weights)) Multipliers(config, recurrent_sizes).fold_into(weights);
  const auto rope = std::make_shared<const Rope>(config.rope(sizes.head_dim));

  const int num_layers = config.require_positive_int("num_hidden_layers");
  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (int i = 0; i < num_layers; ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {attention_bias, attention_bias});
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    layers.push_back(make_layer(FalconH1Layer{
        .input_layernorm = weights.take_rms_norm(path + ".input_layernorm", sizes.hidden_size, eps),
        .mamba = take_mamba2_mixer(weights, path + ".mamba", recurrent_sizes, recurrent_options),
        .self_attn = std::move(attention),
        .pre_ff_layernorm = weights.take_rms_norm(path + ".pre_ff_layernorm", sizes.hidden_size, eps),
        .feed_forward = take_gated_mlp(weights, path + ".feed_forward", sizes.hidden_size, F, mlp_bias)}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps, .norm = "model.final_layernorm"});
  ends.layers = std::move(layers);
  ends.kinds = std::vector<LayerKind>(static_cast<std::size_t>(num_layers), RecurrentAndAttention{kMambaSlots});
  // A head of its own has its multiplier in it; the embedding has the embedding's.
  if (!ends.lm_head) {
    ends.logit_scale =
        config.get_float("lm_head_multiplier").value_or(1.0f) / config.get_float("embedding_multiplier").value_or(1.0f);
  }
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
