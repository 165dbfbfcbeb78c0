#include "reprise/storage/gguf_model.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/storage/gguf.h"
#include "reprise/storage/gguf_blocks.h"
#include "reprise/storage/gguf_metadata.h"
#include "reprise/storage/gguf_weights.h"
#include "reprise/storage/mapped_file.h"
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

struct Name {
  const char* gguf;
  const char* hugging_face;
};

constexpr std::array<Name, 4> kModelNames{{{"token_embd", "model.embed_tokens"},
                                           {"output_norm", "model.norm"},
                                           {"output", "lm_head"},
                                           {"rope_freqs", "model.rope_freqs"}}};

constexpr std::array<Name, 9> kLayerNames{{{"attn_norm", "input_layernorm"},
                                           {"attn_q", "self_attn.q_proj"},
                                           {"attn_k", "self_attn.k_proj"},
                                           {"attn_v", "self_attn.v_proj"},
                                           {"attn_output", "self_attn.o_proj"},
                                           {"ffn_norm", "post_attention_layernorm"},
                                           {"ffn_gate", "mlp.gate_proj"},
                                           {"ffn_up", "mlp.up_proj"},
                                           {"ffn_down", "mlp.down_proj"}}};

struct Heads {
  int queries;
  int keys_values;
};

template <std::size_t N>
const char* find_name(const std::array<Name, N>& names, const std::string& gguf) {
  for (const Name& name : names) {
    if (gguf == name.gguf) return name.hugging_face;
  }
  return nullptr;
}

// "blk.7.attn_q.weight" → "model.layers.7.self_attn.q_proj.weight", with the heads whose rows are interleaved.
GgufConversion conversion_of(const GgufTensor& tensor, const Heads& heads) {
  const std::string& name = tensor.name;
  const std::size_t last_dot = name.rfind('.');
  const std::string suffix = last_dot == std::string::npos ? "" : name.substr(last_dot);
  if (suffix == ".weight" || suffix == ".bias") {
    const std::string stem = name.substr(0, last_dot);
    if (const char* found = find_name(kModelNames, stem)) return {&tensor, found + suffix};
    const std::size_t part = stem.find('.', 4);
    if (stem.starts_with("blk.") && part != std::string::npos) {
      const std::string layer = stem.substr(4, part - 4);
      const std::string role = stem.substr(part + 1);
      const char* found = find_name(kLayerNames, role);
      if (found != nullptr && !layer.empty() && layer.find_first_not_of("0123456789") == std::string::npos) {
        GgufConversion conversion{&tensor, "model.layers." + layer + "." + found + suffix};
        if (role == "attn_q") conversion.heads = heads.queries;
        if (role == "attn_k") conversion.heads = heads.keys_values;
        return conversion;
      }
    }
  }
  unsupported("tensor " + printable(name) + " has no place in architecture llama");
}

const GgufTensor* find_tensor(const GgufHeader& header, const std::string& name) {
  for (const GgufTensor& tensor : header.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

// Settings that would change the result and that Hugging Face's llama has no place for.
void refuse_variants(const GgufHeader& header, const GgufMetadata& metadata) {
  if (metadata.count("split.count").value_or(1) > 1) unsupported("GGUF files in several parts are not supported");
  if (metadata.count("llama.expert_count").value_or(0) > 0) unsupported("GGUF mixtures of experts are not supported");
  for (const char* key : {"llama.attention.scale", "llama.residual_scale", "llama.embedding_scale", "llama.logit_scale",
                          "llama.rope.scaling.attn_factor"}) {
    const double value = metadata.number(key).value_or(1.0);
    if (value != 0.0 && value != 1.0) unsupported(std::string("GGUF metadata key ") + key + " is not supported");
  }
  if (find_tensor(header, "rope_factors_long.weight") != nullptr) unsupported("GGUF's longrope is not supported");
}

// `rope_scaling`, or null.
json rope_scaling_of(const GgufHeader& header, const GgufMetadata& metadata) {
  std::string type = metadata.string("llama.rope.scaling.type").value_or("none");
  double factor = metadata.number("llama.rope.scaling.factor").value_or(0.0);
  if (const auto old_factor = metadata.number("llama.rope.scale_linear"); old_factor && type == "none") {
    type = "linear";
    factor = *old_factor;
  }
  if (factor == 0.0 || factor == 1.0 || type == "none") {
    return nullptr;  // nothing is scaled
  }
  if (find_tensor(header, "rope_freqs.weight") != nullptr) {
    unsupported("GGUF rope scaling " + printable(type) + " beside rope_freqs is not supported");
  }
  json scaling = {{"rope_type", type}, {"type", type}, {"factor", factor}};
  if (type == "linear") return scaling;
  if (type != "yarn") unsupported("GGUF rope scaling type " + printable(type) + " is not supported");
  if (const auto context = metadata.count("llama.rope.scaling.original_context_length")) {
    scaling["original_max_position_embeddings"] = *context;
  }
  if (const auto fast = metadata.number("llama.rope.scaling.yarn_beta_fast")) scaling["beta_fast"] = *fast;
  if (const auto slow = metadata.number("llama.rope.scaling.yarn_beta_slow")) scaling["beta_slow"] = *slow;
  return scaling;
}

// The commonest format stands for all; each other module is named, `false` for one that is not quantised.
json quantization_of(const std::vector<GgufConversion>& conversions) {
  std::map<int, int> num_tensors;  // by bits
  for (const GgufConversion& conversion : conversions) {
    if (const auto format = block_format(conversion.tensor->type)) ++num_tensors[format->bits];
  }
  if (num_tensors.empty()) return nullptr;
  auto common = num_tensors.begin();
  for (auto it = num_tensors.begin(); it != num_tensors.end(); ++it) {
    if (it->second > common->second) common = it;
  }
  json quantization = {{"group_size", kGroupSize}, {"bits", common->first}};
  for (const GgufConversion& conversion : conversions) {
    if (conversion.tensor->shape.size() < 2 || !conversion.name.ends_with(".weight")) continue;
    const std::string module = conversion.name.substr(0, conversion.name.size() - std::string(".weight").size());
    const auto format = block_format(conversion.tensor->type);
    if (!format) {
      quantization[module] = false;
    } else if (format->bits != common->first) {
      quantization[module] = {{"group_size", kGroupSize}, {"bits", format->bits}};
    }
  }
  return quantization;
}

std::string config_of(const GgufHeader& header, const GgufMetadata& metadata, const Heads& heads,
                      const std::vector<GgufConversion>& conversions) {
  const int hidden_size = metadata.required_count("llama.embedding_length");
  const std::optional<int> key_length = metadata.count("llama.attention.key_length");
  if (!key_length && hidden_size % heads.queries != 0) {
    corrupt(std::to_string(heads.queries) + " heads do not divide llama.embedding_length " +
            std::to_string(hidden_size));
  }
  const int head_dim = key_length.value_or(hidden_size / heads.queries);
  if (metadata.count("llama.attention.value_length").value_or(head_dim) != head_dim) {
    unsupported("GGUF heads of different key and value lengths are not supported");
  }
  if (metadata.count("llama.rope.dimension_count").value_or(head_dim) != head_dim) {
    unsupported("GGUF rotation of only a part of each head is not supported");
  }
  const GgufTensor* embeddings = find_tensor(header, "token_embd.weight");
  if (embeddings == nullptr || embeddings->shape.size() != 2)
    corrupt("tensor token_embd.weight is missing or no matrix");

  json config = {{"model_type", "llama"},
                 {"hidden_size", hidden_size},
                 {"num_hidden_layers", metadata.required_count("llama.block_count")},
                 {"intermediate_size", metadata.required_count("llama.feed_forward_length")},
                 {"num_attention_heads", heads.queries},
                 {"num_key_value_heads", heads.keys_values},
                 {"rope_theta", metadata.number("llama.rope.freq_base").value_or(10000.0)},
                 {"vocab_size", embeddings->shape[0]},
                 {"tie_word_embeddings", find_tensor(header, "output.weight") == nullptr}};
  const auto eps = metadata.number("llama.attention.layer_norm_rms_epsilon");
  if (!eps) corrupt("metadata key llama.attention.layer_norm_rms_epsilon is missing");
  config["rms_norm_eps"] = *eps;
  if (std::int64_t{head_dim} * heads.queries != hidden_size) config["head_dim"] = head_dim;
  if (const auto length = metadata.count("llama.context_length")) config["max_position_embeddings"] = *length;
  if (find_tensor(header, "blk.0.attn_q.bias") != nullptr) config["attention_bias"] = true;
  if (find_tensor(header, "blk.0.ffn_gate.bias") != nullptr) config["mlp_bias"] = true;
  if (json scaling = rope_scaling_of(header, metadata); !scaling.is_null()) config["rope_scaling"] = std::move(scaling);
  if (json spec = quantization_of(conversions); !spec.is_null()) config["quantization"] = std::move(spec);
  if (const auto id = metadata.count("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *id;
  if (const auto id = metadata.count("tokenizer.ggml.eos_token_id")) config["eos_token_id"] = *id;
  return config.dump(1);
}

TokenizerData tokenizer_of(const GgufMetadata& metadata) {
  const std::string prefix = "tokenizer.ggml.";
  TokenizerData data;
  data.chat_template = metadata.string("tokenizer.chat_template").value_or("");
  const auto model = metadata.string(prefix + "model");
  if (!model) return data;

  GgufTokenizerData& gguf = data.gguf.emplace();
  gguf.model = *model;
  gguf.pre = metadata.string(prefix + "pre").value_or("");
  gguf.tokens = metadata.strings(prefix + "tokens");
  gguf.merges = metadata.strings(prefix + "merges");
  for (const double score : metadata.numbers(prefix + "scores")) gguf.scores.push_back(static_cast<float>(score));
  for (const std::int64_t type : metadata.integers(prefix + "token_type")) {
    gguf.token_types.push_back(static_cast<int>(type));
  }
  const std::size_t num_tokens = gguf.tokens.size();
  if ((!gguf.scores.empty() && gguf.scores.size() != num_tokens) ||
      (!gguf.token_types.empty() && gguf.token_types.size() != num_tokens)) {
    corrupt("the tokenizer's tokens, scores and types differ in number");
  }
  gguf.add_bos_token = metadata.boolean(prefix + "add_bos_token");
  gguf.add_eos_token = metadata.boolean(prefix + "add_eos_token");
  gguf.add_space_prefix = metadata.boolean(prefix + "add_space_prefix");

  const auto token_id = [&](const char* role) -> std::optional<TokenId> {
    const std::string key = prefix + role + "_token_id";
    const std::optional<int> id = metadata.count(key);
    if (id && static_cast<std::size_t>(*id) >= num_tokens) {
      corrupt("metadata key " + key + " must be below " + std::to_string(num_tokens) + ", but got " +
              std::to_string(*id));
    }
    return id;
  };
  const auto text_of = [&](std::optional<TokenId> id) {
    return id ? gguf.tokens[static_cast<std::size_t>(*id)] : std::string();
  };
  gguf.unknown_token_id = token_id("unknown");
  data.bos_token_id = token_id("bos");
  data.bos_token = text_of(data.bos_token_id);
  data.eos_token = text_of(token_id("eos"));
  data.unk_token = text_of(gguf.unknown_token_id);
  data.pad_token = text_of(token_id("padding"));
  for (const char* role : {"eos", "eot", "eom"}) {
    const std::optional<TokenId> id = token_id(role);
    if (id && std::find(data.eos_token_ids.begin(), data.eos_token_ids.end(), *id) == data.eos_token_ids.end()) {
      data.eos_token_ids.push_back(*id);
    }
  }
  return data;
}

// Work on a thread of its own, where there is one to be had.
class Beside {
 public:
  explicit Beside(std::function<void()> work) {
    const auto guarded = [this, does = std::move(work)] {
      try {
        does();
      } catch (...) {
        failure_ = std::current_exception();
      }
    };
    try {
      thread_ = std::thread(guarded);
    } catch (const std::system_error&) {
      guarded();
    }
  }
  ~Beside() { join(); }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  // Throws: what the work threw.
  void finish() {
    join();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace

ModelFiles read_gguf_model(const std::filesystem::path& file,
                           const std::function<void(const TokenizerData&)>& beside_weights) {
  const std::shared_ptr<MappedFile> mapping = MappedFile::open(file, "read_model_files");
  ModelFiles files;
  std::optional<Beside> beside;
  try {
    const GgufHeader header = parse_gguf(mapping->bytes(), mapping->bytes().size());
    const GgufMetadata metadata(header);
    const std::string architecture = metadata.string("general.architecture").value_or("");
    if (architecture != "llama") unsupported("GGUF architecture " + printable(architecture) + " is not supported");
    refuse_variants(header, metadata);
    const int num_heads = metadata.required_count("llama.attention.head_count");
    const Heads heads{num_heads, metadata.count("llama.attention.head_count_kv").value_or(num_heads)};

    std::vector<GgufConversion> conversions;
    for (const GgufTensor& tensor : header.tensors) conversions.push_back(conversion_of(tensor, heads));
    files.path = file;
    files.config_json = config_of(header, metadata, heads, conversions);
    files.tokenizer = tokenizer_of(metadata);
    if (beside_weights) {
      beside.emplace([&] {
        beside_weights(files.tokenizer);
        sha256_hex("");  // OpenSSL starts in milliseconds: now, and not when the fingerprint is made
      });
    }
    files.weights = convert_gguf_tensors(conversions, header.data_offset, mapping, beside.has_value());
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + " (in " + file.string() + ")");
  }
  if (beside) beside->finish();
  return files;
}

}  // namespace reprise::internal
