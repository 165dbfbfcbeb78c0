// Gemma 3: five layers with a sliding window to one that sees everything, each kind with its own rotary base; norms of
// queries and keys. Gemma Team, https://arxiv.org/abs/2503.19786. Of models that see, the language part.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/architectures.h"
#include "reprise/models/attention_block.h"
#include "reprise/models/config.h"
#include "reprise/models/decoder.h"
#include "reprise/models/gemma_layer.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// What released configs leave out.
constexpr const char* kTextDefaults = R"({
  "hidden_size": 1152, "num_hidden_layers": 26, "intermediate_size": 6912, "num_attention_heads": 4,
  "num_key_value_heads": 1, "head_dim": 256, "rms_norm_eps": 1e-6, "vocab_size": 262144,
  "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256.0, "sliding_window": 512,
  "max_position_embeddings": 131072
})";
constexpr const char* kDefaultsBesideVision = R"({"num_attention_heads": 8, "num_key_value_heads": 4})";

// The last of every `sliding_window_pattern` layers sees everything.
std::vector<LayerKind> layer_kinds(const Config& config) {
  if (config.has("layer_types")) return attention_kinds(config);
  const char* key = config.has("sliding_window_pattern") ? "sliding_window_pattern" : "_sliding_window_pattern";
  const int pattern = config.has(key) ? config.require_positive_int(key) : 6;
  const int window = config.require_positive_int("sliding_window");
  std::vector<LayerKind> kinds;
  for (int i = 0; i < config.require_positive_int("num_hidden_layers"); ++i) {
    const bool sees_all = i % pattern == pattern - 1;
    kinds.push_back(sees_all ? LayerKind(FullAttention{}) : LayerKind(SlidingAttention{window}));
  }
  return kinds;
}

struct Ropes {
  std::shared_ptr<const Rope> full;
  std::shared_ptr<const Rope> sliding;

  Ropes(const Config& config, int dims) {
    full = std::make_shared<const Rope>(
        config.rope(dims, {.layer_type = "full_attention", .base_otherwise = 1'000'000.0f}));
    const auto parts = config.get_object("rope_parameters");
    sliding = std::make_shared<const Rope>(
        parts && parts->has("sliding_attention")
            ? config.rope(dims, {.layer_type = "sliding_attention"})
            : RopeOptions{.dims = dims, .base = config.require_positive_float("rope_local_base_freq")});
  }
};

// A root rounded to bfloat16, as in the released models' training.
float embedding_scale(int hidden_size) {
  const mx::array root = mx::astype(mx::array(std::sqrt(static_cast<float>(hidden_size))), mx::bfloat16);
  return mx::astype(root, mx::float32).item<float>();
}

std::unique_ptr<LanguageModel> make(const Config& config, const std::string& model_type, const std::string& prefix,
                                    WeightReader& weights, const ModelOptions& options) {
  const auto sizes = AttentionSizes::from(config);
  require_gemma_activation(config);
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (config.has(key)) throw Error(ErrorCode::unsupported, std::string("[make_model] Gemma 3 must not have ") + key);
  }
  const float eps = norm_eps(config);
  auto kinds = layer_kinds(config);
  const Ropes ropes(config, sizes.head_dim);
  drop_rotary_buffers(weights);

  std::vector<std::unique_ptr<DecoderLayer>> layers;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string path = prefix + "model.layers." + std::to_string(i);
    auto attention = take_attention(weights, path + ".self_attn", sizes);
    attention.scale = 1.0f / std::sqrt(config.require_positive_float("query_pre_attn_scalar"));
    attention.q_norm = weights.take_rms_norm(path + ".self_attn.q_norm", sizes.head_dim, eps, kGemmaNormPlus);
    attention.k_norm = weights.take_rms_norm(path + ".self_attn.k_norm", sizes.head_dim, eps, kGemmaNormPlus);
    attention.rope = std::holds_alternative<FullAttention>(kinds[i]) ? ropes.full : ropes.sliding;
    attention.stored_dtype = kv_dtype(options, weights.dtype());
    layers.push_back(make_layer(take_gemma_layer(weights, path, config, std::move(attention))));
  }
  auto ends = take_decoder_ends(weights, config, {.prefix = prefix, .norm_eps = eps, .norm_plus = kGemmaNormPlus});
  ends.layers = std::move(layers);
  ends.kinds = std::move(kinds);
  ends.embedding_scale = embedding_scale(sizes.hidden_size);
  ModelInfo info = model_info(config, weights);
  info.model_type = model_type;
  return make_decoder(std::move(info), weights, std::move(ends));
}

// Newer checkpoints have "model.language_model.…", and the head beside it.
std::string renamed(const std::string& name) {
  const std::string newer = "model.language_model.";
  if (name.starts_with(newer)) return "language_model.model." + name.substr(newer.size());
  return name.starts_with("lm_head.") ? "language_model." + name : name;
}

bool is_of_vision(const std::string& name) {
  for (const std::string part : {"vision_tower.", "multi_modal_projector."}) {
    if (name.starts_with(part) || name.starts_with("model." + part)) return true;
  }
  return false;
}

}  // namespace

std::unique_ptr<LanguageModel> make_gemma3_text(const ModelFiles& files, const ModelOptions& options) {
  const Config config = Config(files.config_json).with_defaults(kTextDefaults);
  WeightReader weights(files, config, options);
  return make(config, "gemma3_text", "", weights, options);
}

std::unique_ptr<LanguageModel> make_gemma3(const ModelFiles& files, const ModelOptions& options) {
  const Config outer(files.config_json);
  const Config inner = outer.require_object("text_config");
  // The outer config's vocabulary is the one.
  const int V = outer.get_int("vocab_size").value_or(inner.get_int("vocab_size").value_or(262208));
  const Config config = inner.with_member("vocab_size", V)
                            .with_defaults(kDefaultsBesideVision)
                            .with_defaults(kTextDefaults)
                            .with_defaults(R"({"model_type": "gemma3_text"})");
  WeightReader weights(files, outer, options);
  weights.drop(is_of_vision);
  weights.rename(renamed);
  return make(config, "gemma3", "language_model.", weights, options);
}

}  // namespace reprise::internal
