#include "reprise/storage/gguf_config.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/storage/gguf_blocks.h"
#include "reprise/storage/system_error.h"

namespace reprise::internal {
namespace {

using json = nlohmann::json;

[[noreturn]] void unsupported(const std::string& what) {
  throw Error(ErrorCode::unsupported, "[read_model_files] " + what);
}

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[read_model_files] " + what);
}

bool is_model(const GgufModelView& file, std::string_view model_type) {
  return file.architecture.model_type == model_type;
}

}  // namespace

void refuse_gguf_variants(const GgufModelView& file) {
  const GgufMetadata& metadata = file.metadata;
  if (metadata.count("split.count").value_or(1) > 1) unsupported("GGUF files in several parts are not supported");
  if (metadata.count(file.key("expert_count")).value_or(0) > 0) {
    unsupported("GGUF mixtures of experts are not supported");
  }
  std::vector<const char*> factors = {"attention.scale", "residual_scale",         "embedding_scale",
                                      "logit_scale",     "attn_logit_softcapping", "final_logit_softcapping"};
  // phi3 has a place for it, below.
  if (!is_model(file, "phi3")) factors.push_back("rope.scaling.attn_factor");
  for (const char* rest : factors) {
    const double value = metadata.number(file.key(rest)).value_or(1.0);
    if (value != 0.0 && value != 1.0) unsupported("GGUF metadata key " + file.key(rest) + " is not supported");
  }
  // llama.cpp writes phi3's window and leaves it unused, as mlx-lm does.
  if (!is_model(file, "gemma3_text") && !is_model(file, "phi3") &&
      metadata.count(file.key("attention.sliding_window")).value_or(0) > 0) {
    unsupported("GGUF metadata key " + file.key("attention.sliding_window") + " is not supported");
  }
  if (!is_model(file, "phi3") && find_tensor(file.header, "rope_factors_long.weight") != nullptr) {
    unsupported("GGUF's longrope is not supported in architecture " + std::string(file.architecture.name));
  }
}

namespace {

// `rope_scaling` of the types that all architectures have, or null.
json plain_rope_scaling(const GgufModelView& file) {
  const GgufMetadata& metadata = file.metadata;
  std::string type = metadata.string(file.key("rope.scaling.type")).value_or("none");
  double factor = metadata.number(file.key("rope.scaling.factor")).value_or(0.0);
  if (const auto old_factor = metadata.number(file.key("rope.scale_linear")); old_factor && type == "none") {
    type = "linear";
    factor = *old_factor;
  }
  if (factor == 0.0 || factor == 1.0 || type == "none") {
    return nullptr;  // nothing is scaled
  }
  if (find_tensor(file.header, "rope_freqs.weight") != nullptr) {
    unsupported("GGUF rope scaling " + printable(type) + " beside rope_freqs is not supported");
  }
  json scaling = {{"rope_type", type}, {"type", type}, {"factor", factor}};
  if (type == "linear") return scaling;
  if (type != "yarn") unsupported("GGUF rope scaling type " + printable(type) + " is not supported");
  if (const auto context = metadata.count(file.key("rope.scaling.original_context_length"))) {
    scaling["original_max_position_embeddings"] = *context;
  }
  if (const auto fast = metadata.number(file.key("rope.scaling.yarn_beta_fast"))) scaling["beta_fast"] = *fast;
  if (const auto slow = metadata.number(file.key("rope.scaling.yarn_beta_slow"))) scaling["beta_slow"] = *slow;
  return scaling;
}

std::vector<float> rope_factors(const GgufModelView& file, const GgufTensor& tensor) {
  if (tensor.type != gguf_type::f32 || tensor.shape.size() != 1) {
    unsupported("tensor " + printable(tensor.name) + " must be a float32 vector");
  }
  std::vector<float> factors(static_cast<std::size_t>(tensor.shape[0]));
  std::memcpy(factors.data(), file.bytes.data() + file.header.data_offset + tensor.offset, tensor.size_bytes);
  return factors;
}

// LongRoPE, whose factors are tensors; or as plain_rope_scaling.
json phi3_rope_scaling(const GgufModelView& file) {
  const GgufTensor* longs = find_tensor(file.header, "rope_factors_long.weight");
  const GgufTensor* shorts = find_tensor(file.header, "rope_factors_short.weight");
  if ((longs == nullptr) != (shorts == nullptr)) corrupt("only one of phi3's two tensors of rope factors is there");
  if (longs == nullptr) return plain_rope_scaling(file);
  json scaling = {{"rope_type", "longrope"},
                  {"type", "longrope"},
                  {"long_factor", rope_factors(file, *longs)},
                  {"short_factor", rope_factors(file, *shorts)}};
  const auto original = file.metadata.count(file.key("rope.scaling.original_context_length"));
  const auto magnitude = file.metadata.number(file.key("rope.scaling.attn_factor"));
  if (original) scaling["original_max_position_embeddings"] = *original;
  if (magnitude && *magnitude != 0.0) scaling["long_mscale"] = *magnitude;
  return scaling;
}

// The commonest format stands for all; each other module is named, `false` for one that is not quantised.
json quantization_of(const std::vector<GgufConversion>& conversions) {
  using Kind = std::pair<int, int>;  // group size, bits
  std::map<Kind, int> num_tensors;
  for (const GgufConversion& conversion : conversions) {
    if (const auto format = block_format(conversion.tensor->type)) ++num_tensors[{format->group_size, format->bits}];
  }
  if (num_tensors.empty()) return nullptr;
  const auto common = std::max_element(num_tensors.begin(), num_tensors.end(), [](const auto& a, const auto& b) {
                        return a.second < b.second;
                      })->first;
  const auto spec_of = [](const Kind& kind) { return json{{"group_size", kind.first}, {"bits", kind.second}}; };
  json quantization = spec_of(common);
  for (const GgufConversion& conversion : conversions) {
    if (conversion.tensor->shape.size() < 2 || !conversion.name.ends_with(".weight")) continue;
    const std::string module = conversion.name.substr(0, conversion.name.size() - std::string(".weight").size());
    const auto format = block_format(conversion.tensor->type);
    if (!format) {
      quantization[module] = false;
    } else if (const Kind kind{format->group_size, format->bits}; kind != common) {
      quantization[module] = spec_of(kind);
    }
  }
  return quantization;
}

int head_dim_of(const GgufModelView& file, const GgufHeads& heads, int hidden_size) {
  const std::optional<int> key_length = file.metadata.count(file.key("attention.key_length"));
  if (!key_length && hidden_size % heads.queries != 0) {
    corrupt(std::to_string(heads.queries) + " heads do not divide " + file.key("embedding_length") + " " +
            std::to_string(hidden_size));
  }
  const int head_dim = key_length.value_or(hidden_size / heads.queries);
  if (file.metadata.count(file.key("attention.value_length")).value_or(head_dim) != head_dim) {
    unsupported("GGUF heads of different key and value lengths are not supported");
  }
  return head_dim;
}

void add_gemma3(const GgufModelView& file, const GgufHeads& heads, int head_dim, json& config) {
  // The one size whose scores are scaled by hidden features per head: 27B, told by its layers as llama.cpp does.
  constexpr int kLayersOf27B = 62;
  const bool is_27b = config["num_hidden_layers"] == kLayersOf27B;
  config["query_pre_attn_scalar"] = is_27b ? config["hidden_size"].get<int>() / heads.queries : head_dim;
  config["hidden_activation"] = "gelu_pytorch_tanh";
  config["sliding_window"] = file.metadata.required_count(file.key("attention.sliding_window"));
  const std::string pattern = file.key("attention.sliding_window_pattern");
  config["sliding_window_pattern"] = file.metadata.has(pattern) ? file.metadata.required_count(pattern) : 6;
  config["rope_local_base_freq"] = file.metadata.number(file.key("rope.freq_base_swa")).value_or(10000.0);
}

void add_phi3(const GgufModelView& file, int head_dim, json& config) {
  const int rotated = file.metadata.count(file.key("rope.dimension_count")).value_or(head_dim);
  if (rotated > head_dim) corrupt(file.key("rope.dimension_count") + " is beyond a head's " + std::to_string(head_dim));
  if (rotated != head_dim) config["partial_rotary_factor"] = static_cast<double>(rotated) / head_dim;
  if (const auto original = file.metadata.count(file.key("rope.scaling.original_context_length"))) {
    config["original_max_position_embeddings"] = *original;
  }
}

}  // namespace

GgufHeads gguf_heads(const GgufModelView& file) {
  const int queries = file.metadata.required_count(file.key("attention.head_count"));
  const int keys_values = file.metadata.count(file.key("attention.head_count_kv")).value_or(queries);
  return {queries, keys_values};
}

std::string gguf_config(const GgufModelView& file, const GgufHeads& heads,
                        const std::vector<GgufConversion>& conversions) {
  const GgufMetadata& metadata = file.metadata;
  const int hidden_size = metadata.required_count(file.key("embedding_length"));
  const int head_dim = head_dim_of(file, heads, hidden_size);
  const bool rotates_parts = is_model(file, "phi3");
  if (!rotates_parts && metadata.count(file.key("rope.dimension_count")).value_or(head_dim) != head_dim) {
    unsupported("GGUF rotation of only a part of each head is not supported");
  }
  const GgufTensor* embeddings = find_tensor(file.header, "token_embd.weight");
  if (embeddings == nullptr || embeddings->shape.size() != 2)
    corrupt("tensor token_embd.weight is missing or no matrix");

  json config = {{"model_type", file.architecture.model_type},
                 {"hidden_size", hidden_size},
                 {"num_hidden_layers", metadata.required_count(file.key("block_count"))},
                 {"intermediate_size", metadata.required_count(file.key("feed_forward_length"))},
                 {"num_attention_heads", heads.queries},
                 {"num_key_value_heads", heads.keys_values},
                 {"rope_theta", metadata.number(file.key("rope.freq_base")).value_or(10000.0)},
                 {"vocab_size", embeddings->shape[0]},
                 {"tie_word_embeddings", find_tensor(file.header, "output.weight") == nullptr}};
  const auto eps = metadata.number(file.key("attention.layer_norm_rms_epsilon"));
  if (!eps) corrupt("metadata key " + file.key("attention.layer_norm_rms_epsilon") + " is missing");
  config["rms_norm_eps"] = *eps;
  // The others' defaults are no quotient.
  if (!is_model(file, "llama") || std::int64_t{head_dim} * heads.queries != hidden_size) config["head_dim"] = head_dim;
  if (const auto length = metadata.count(file.key("context_length"))) config["max_position_embeddings"] = *length;
  if (is_model(file, "llama") && find_tensor(file.header, "blk.0.attn_q.bias") != nullptr) {
    config["attention_bias"] = true;
  }
  if (find_tensor(file.header, "blk.0.ffn_gate.bias") != nullptr) config["mlp_bias"] = true;
  if (is_model(file, "gemma3_text")) add_gemma3(file, heads, head_dim, config);
  if (is_model(file, "phi3")) add_phi3(file, head_dim, config);
  json scaling = is_model(file, "phi3") ? phi3_rope_scaling(file) : plain_rope_scaling(file);
  if (!scaling.is_null()) config["rope_scaling"] = std::move(scaling);
  if (json spec = quantization_of(conversions); !spec.is_null()) config["quantization"] = std::move(spec);
  if (const auto id = metadata.count("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *id;
  if (const auto id = metadata.count("tokenizer.ggml.eos_token_id")) config["eos_token_id"] = *id;
  return config.dump(1);
}

}  // namespace reprise::internal
