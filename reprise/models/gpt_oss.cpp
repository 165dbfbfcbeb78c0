// gpt-oss: attention with sinks over a window in every other layer, and mixtures of experts with a clipped gate and
// biases. OpenAI, https://arxiv.org/abs/2508.10925.
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
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/moe.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct GptOssMoe {
  Linear router;
  SwitchGlu experts;
  int experts_per_token;

  mx::array operator()(const mx::array& x) const { return experts(x, softmax_of_top_k(router(x), experts_per_token)); }
};

struct GptOssLayer {
  Norm input_layernorm;
  AttentionBlock self_attn;
  RmsNorm post_attention_layernorm;
  GptOssMoe mlp;

  mx::array forward(const mx::array& h, const LayerStep& step) const {
    const mx::array r = self_attn.add_to(h, h, input_layernorm, step.attention_cache(), step.mask);
    return mx::add(r, mlp(post_attention_layernorm(r)));
  }
};

// Windows in every other layer, the first among them, where the config names no types.
std::vector<LayerKind> layer_kinds(const Config& config) {
  auto kinds = attention_kinds(config);
  if (!config.get_strings("layer_types").empty()) return kinds;
  for (std::size_t i = 0; i < kinds.size(); i += 2) {
    kinds[i] = SlidingAttention{config.require_positive_int("sliding_window")};
  }
  return kinds;
}

// One of two maps whose rows alternate along `axis`.
mx::array every_other(const mx::array& a, int axis, int first) {
  mx::Shape start(a.ndim(), 0);
  mx::Shape step(a.ndim(), 1);
  const auto at = static_cast<std::size_t>(axis + static_cast<int>(a.ndim()));
  start[at] = first;
  step[at] = 2;
  return mx::slice(a, start, a.shape(), step);
}

// Original checkpoints: a map is `name`_blocks [..., groups, 16 bytes] with `name`_scales where it is quantised, else
// [experts, in, out]; gate and up are one map whose outputs alternate.
void bring_original_experts(WeightReader& weights, const std::string& path) {
  struct Part {
    mx::array array;
    std::string suffix;
  };
  const auto release_map = [&](const std::string& name) {
    std::vector<Part> parts;
    if (weights.has(name + "_blocks")) {
      const mx::array blocks = weights.release(name + "_blocks");
      if (blocks.dtype() != mx::uint8 || blocks.ndim() != 4 || blocks.shape(3) != 16) {
        throw Error(ErrorCode::corrupt_data, "[make_model] weight '" + name +
                                                 "_blocks' must be bytes [experts, out, groups, 16], but got rank " +
                                                 std::to_string(blocks.ndim()));
      }
      const mx::array words = mx::view(mx::contiguous(blocks), mx::uint32);
      parts.push_back({mx::reshape(words, {words.shape(0), words.shape(1), words.shape(2) * 4}), ".weight"});
      parts.push_back({weights.release(name + "_scales"), ".scales"});
    } else {
      const mx::array map = weights.release(name);
      if (map.ndim() != 3) {
        throw Error(ErrorCode::corrupt_data, "[make_model] weight '" + name +
                                                 "' must be [experts, in, out], but got rank " +
                                                 std::to_string(map.ndim()));
      }
      parts.push_back({mx::swapaxes(map, -1, -2), ".weight"});
    }
    return parts;
  };
  const auto is_there = [&](const std::string& name) { return weights.has(name) || weights.has(name + "_blocks"); };
  if (const std::string name = path + ".gate_up_proj"; is_there(name)) {
    for (const auto& [array, suffix] : release_map(name)) {
      if (array.ndim() < 2) {
        throw Error(ErrorCode::corrupt_data, "[make_model] weight '" + name + "' must be a stack of matrices");
      }
      weights.put(path + ".gate_proj" + suffix, every_other(array, -2, 0));
      weights.put(path + ".up_proj" + suffix, every_other(array, -2, 1));
    }
    const mx::array bias = weights.release(name + "_bias");
    if (bias.ndim() < 1) {
      throw Error(ErrorCode::corrupt_data, "[make_model] weight '" + name + "_bias' must be [experts, out]");
    }
    weights.put(path + ".gate_proj.bias", every_other(bias, -1, 0));
    weights.put(path + ".up_proj.bias", every_other(bias, -1, 1));
  }
  if (const std::string name = path + ".down_proj"; is_there(name)) {
    for (const auto& [array, suffix] : release_map(name)) weights.put(name + suffix, array);
    weights.put(name + ".bias", weights.release(name + "_bias"));
  }
}

float swiglu_limit(const Config& config) {
  const float limit = config.get_float("swiglu_limit").value_or(ClippedSwiglu{}.limit);
  if (limit > 0.0f) return limit;
  throw Error(ErrorCode::corrupt_data, "[make_model] swiglu_limit must be positive");
}

}  // namespace

std::unique_ptr<LanguageModel> make_gpt_oss(const ModelFiles& files, const ModelOptions& options) {
  const Config config(files.config_json);
  const auto sizes = AttentionSizes::from(config);
  const int E = sizes.hidden_size;
  const int F = config.require_positive_int("intermediate_size");
  const float eps = norm_eps(config, "rms_norm_eps", 1e-5f);
  const bool bias = config.get_bool("attention_bias").value_or(true);
  const auto experts = ExpertCounts::from(config, "num_local_experts", "num_experts_per_tok");
  const ClippedSwiglu activation{.limit = swiglu_limit(config)};
  require_activation(config, "hidden_act", {"silu", "swish"});
  auto kinds = layer_kinds(config);

  WeightReader weights(files, config, options);
  drop_rotary_buffers(weights);
  // The scaling's `truncate` is not looked at: its default is how the oracle always computes.
  const auto rope = std::make_shared<const Rope>(config.rope(sizes.head_dim, {.base_otherwise = 150000.0f}));

  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes, {bias, bias});
    attention.sinks = weights.take(path + ".self_attn.sinks", {sizes.heads});
    attention.rope = rope;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    bring_original_experts(weights, path + ".mlp.experts");
    auto glu = weights.take_switch_glu(path + ".mlp.experts", experts.all, E, F, /*bias=*/true);
    glu.activation = activation;
    layers.push_back(make_layer(GptOssLayer{
        weights.take_rms_norm(path + ".input_layernorm", E, eps),
        std::move(attention),
        weights.take_rms_norm(path + ".post_attention_layernorm", E, eps),
        {weights.take_linear(path + ".mlp.router", experts.all, E, true), std::move(glu), experts.per_token}}));
  }
  auto ends = take_decoder_ends(weights, config, {.norm_eps = eps});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  return make_decoder(config, weights, std::move(ends));
}

}  // namespace reprise::internal
