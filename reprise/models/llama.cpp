#include "reprise/models/llama.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/models/config.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/mlp.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

struct LlamaConfig {
  int hidden_size;
  int num_hidden_layers;
  int intermediate_size;
  int num_attention_heads;
  int num_key_value_heads;
  int head_dim;
  int vocab_size;
  float rms_norm_eps;
  bool attention_bias;
  bool mlp_bias;
  RopeOptions rope;
  int sliding_window = 0;        // of the layers that have one
  std::vector<bool> is_sliding;  // per layer

  explicit LlamaConfig(const Config& config)
      : hidden_size(config.require_positive_int("hidden_size")),
        num_hidden_layers(config.require_positive_int("num_hidden_layers")),
        intermediate_size(config.require_positive_int("intermediate_size")),
        num_attention_heads(config.require_positive_int("num_attention_heads")),
        num_key_value_heads(config.get_int("num_key_value_heads").value_or(num_attention_heads)),
        head_dim(config.get_int("head_dim").value_or(hidden_size / num_attention_heads)),
        vocab_size(config.require_positive_int("vocab_size")),
        rms_norm_eps(config.get_float("rms_norm_eps").value_or(1e-6f)),
        attention_bias(config.get_bool("attention_bias").value_or(false)),
        mlp_bias(config.get_bool("mlp_bias").value_or(false)),
        rope(config.rope(head_dim)) {
    if (num_key_value_heads <= 0 || head_dim <= 0 || num_attention_heads % num_key_value_heads != 0) {
      throw Error(ErrorCode::corrupt_data,
                  "[make_model] num_attention_heads must be a multiple of num_key_value_heads, "
                  "but got " +
                      std::to_string(num_attention_heads) + " and " + std::to_string(num_key_value_heads));
    }
    if (!(rms_norm_eps > 0.0f && std::isfinite(rms_norm_eps))) {
      throw Error(ErrorCode::corrupt_data, "[make_model] rms_norm_eps must be positive");
    }
    if (const auto act = config.get_string("hidden_act"); act && *act != "silu" && *act != "swish") {
      throw Error(ErrorCode::unsupported, "[make_model] hidden_act must be silu, but got '" + *act + "'");
    }
    if (config.get_int("max_position_embeddings").value_or(1) < 1) {
      throw Error(ErrorCode::corrupt_data, "[make_model] max_position_embeddings must be positive");
    }
    take_windows(config);
  }

 private:
  // Mistral's window holds for every layer; where layer types are named, they say which.
  void take_windows(const Config& config) {
    const auto window = config.get_int("sliding_window");
    const std::vector<std::string> types = config.get_strings("layer_types");
    const auto layers = static_cast<std::size_t>(num_hidden_layers);
    is_sliding.assign(layers, types.empty() && window && config.require_string("model_type") == "mistral");
    if (!types.empty() && types.size() != layers) {
      throw Error(ErrorCode::corrupt_data, "[make_model] layer_types must name " + std::to_string(layers) +
                                               " layers, but got " + std::to_string(types.size()));
    }
    for (std::size_t i = 0; i < types.size(); ++i) {
      if (types[i] != "full_attention" && types[i] != "sliding_attention") {
        throw Error(ErrorCode::unsupported, "[make_model] layers of type '" + types[i] + "' are not supported");
      }
      is_sliding[i] = types[i] == "sliding_attention";
    }
    if (std::find(is_sliding.begin(), is_sliding.end(), true) == is_sliding.end()) return;
    sliding_window = config.require_positive_int("sliding_window");
  }
};

class Attention {
 public:
  Attention(const LlamaConfig& config, WeightReader& weights, const std::string& path)
      : heads_(config.num_attention_heads),
        kv_heads_(config.num_key_value_heads),
        head_dim_(config.head_dim),
        q_proj_(weights.take_linear(path + ".q_proj", heads_ * head_dim_, config.hidden_size, config.attention_bias)),
        k_proj_(
            weights.take_linear(path + ".k_proj", kv_heads_ * head_dim_, config.hidden_size, config.attention_bias)),
        v_proj_(
            weights.take_linear(path + ".v_proj", kv_heads_ * head_dim_, config.hidden_size, config.attention_bias)),
        o_proj_(weights.take_linear(path + ".o_proj", config.hidden_size, heads_ * head_dim_, config.attention_bias)) {}

  // residual + attention over norm(residual). residual [B, L, E] → [B, L, E].
  mx::array add_to(const mx::array& residual, const RmsNorm& norm, AttentionCache& cache, const Rope& rope,
                   const Mask& mask, mx::Dtype kv_dtype) const {
    const auto projected = project(residual, norm, {q_proj_, k_proj_, v_proj_});
    const auto out = cache.attend_projections({projected[0], projected[1], projected[2], heads_, kv_heads_},
                                              {.rope = &rope,
                                               .scale = 1.0f / std::sqrt(static_cast<float>(head_dim_)),
                                               .mask = mask,
                                               .stored_dtype = kv_dtype});
    return o_proj_.add_to(residual, out);
  }

 private:
  int heads_;
  int kv_heads_;
  int head_dim_;
  Linear q_proj_;
  Linear k_proj_;
  Linear v_proj_;
  Linear o_proj_;
};

struct Layer {
  RmsNorm input_layernorm;
  Attention self_attn;
  RmsNorm post_attention_layernorm;
  GatedMlp mlp;
};

Layer make_layer(const LlamaConfig& config, WeightReader& weights, const std::string& path) {
  const int E = config.hidden_size;
  const int F = config.intermediate_size;
  return {weights.take_rms_norm(path + ".input_layernorm", E, config.rms_norm_eps),
          Attention(config, weights, path + ".self_attn"),
          weights.take_rms_norm(path + ".post_attention_layernorm", E, config.rms_norm_eps),
          {weights.take_linear(path + ".mlp.gate_proj", F, E, config.mlp_bias),
           weights.take_linear(path + ".mlp.up_proj", F, E, config.mlp_bias),
           weights.take_linear(path + ".mlp.down_proj", E, F, config.mlp_bias)}};
}

class LlamaModel final : public LanguageModel {
 public:
  LlamaModel(ModelInfo info, const LlamaConfig& config, mx::Dtype kv_dtype, Embedding embed_tokens,
             std::vector<Layer> layers, RmsNorm norm, std::optional<Linear> lm_head)
      : LanguageModel(std::move(info)),
        rope_(config.rope),
        kv_dtype_(kv_dtype),
        sliding_window_(config.sliding_window),
        is_sliding_(config.is_sliding),
        embed_tokens_(std::move(embed_tokens)),
        layers_(std::move(layers)),
        norm_(std::move(norm)),
        lm_head_(std::move(lm_head)) {}

  mx::array forward(const mx::array& tokens, PromptCache& cache) const override {
    check_forward(tokens, cache, layers_.size(), info().vocab_size);
    mx::array h = embed_tokens_(tokens);
    // Layers of one kind are in step: the first one's mask serves all. Asked before any of them is updated.
    const std::optional<Mask> full = mask_of_kind(cache, tokens.shape(1), false);
    const std::optional<Mask> sliding = mask_of_kind(cache, tokens.shape(1), true);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Mask& mask = is_sliding_[i] ? *sliding : *full;
      h = layer.self_attn.add_to(h, layer.input_layernorm, cache.at<AttentionCache>(i), rope_, mask, kv_dtype_);
      h = layer.mlp.add_to(h, layer.post_attention_layernorm, h);
    }
    return project(h, norm_, {lm_head_ ? *lm_head_ : embed_tokens_.head()})[0];
  }

  PromptCache make_cache() const override {
    PromptCache cache;
    for (const bool sliding : is_sliding_) {
      if (sliding) {
        cache.push_back(std::make_unique<RotatingKVCache>(sliding_window_));
      } else {
        cache.push_back(std::make_unique<KVCache>());
      }
    }
    return cache;
  }

 private:
  // For N new tokens in the layers with, or without, a window; none where there are no such layers.
  std::optional<Mask> mask_of_kind(PromptCache& cache, int N, bool sliding) const {
    const auto first = std::find(is_sliding_.begin(), is_sliding_.end(), sliding);
    if (first == is_sliding_.end()) return {};
    const auto& layer = cache.at<AttentionCache>(static_cast<std::size_t>(first - is_sliding_.begin()));
    return layer.make_mask(N, {.window = sliding ? std::optional(sliding_window_) : std::nullopt});
  }

  Rope rope_;
  mx::Dtype kv_dtype_;
  int sliding_window_;
  std::vector<bool> is_sliding_;
  Embedding embed_tokens_;
  std::vector<Layer> layers_;
  RmsNorm norm_;
  std::optional<Linear> lm_head_;  // none: tied to the embedding
};

}  // namespace

std::unique_ptr<LanguageModel> make_llama(const ModelFiles& files, const ModelOptions& options) {
  const Config json(files.config_json);
  LlamaConfig config(json);
  WeightReader weights(files.weights, json.quantization_overrides(), compute_dtype(options, files.weights));
  weights.drop([](const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); });
  const bool tied = json.get_bool("tie_word_embeddings").value_or(!weights.has("lm_head.weight"));
  if (tied) weights.drop([](const std::string& name) { return name.starts_with("lm_head."); });
  config.rope.scaling = with_freq_factors(config.rope, weights);

  Embedding embed_tokens = weights.take_embedding("model.embed_tokens", config.vocab_size, config.hidden_size);
  std::vector<Layer> layers;
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    layers.push_back(make_layer(config, weights, "model.layers." + std::to_string(i)));
  }
  RmsNorm norm = weights.take_rms_norm("model.norm", config.hidden_size, config.rms_norm_eps);
  std::optional<Linear> lm_head;
  if (!tied) lm_head = weights.take_linear("lm_head", config.vocab_size, config.hidden_size, false);
  weights.finish();
  return std::make_unique<LlamaModel>(model_info(json, weights), config, kv_dtype(options, weights.dtype()),
                                      std::move(embed_tokens), std::move(layers), std::move(norm), std::move(lm_head));
}

}  // namespace reprise::internal
