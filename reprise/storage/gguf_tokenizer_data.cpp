#include "reprise/storage/gguf_tokenizer_data.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <string>
#include <string_view>

#include "reprise/base/error.h"

namespace reprise::internal {
namespace {

constexpr int kControl = 3;  // of token_type
constexpr int kUserDefined = 4;

// How the tokens that end a turn are spelled. Files made by older converters name only the one that ends a text.
constexpr std::array<std::string_view, 4> kEndOfTurn{"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"};

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[read_model_files] " + what);
}

std::optional<TokenId> spelled_end_of_turn(const GgufTokenizerData& gguf) {
  for (std::size_t id = 0; id < gguf.token_types.size(); ++id) {
    if (gguf.token_types[id] != kControl && gguf.token_types[id] != kUserDefined) continue;
    if (std::find(kEndOfTurn.begin(), kEndOfTurn.end(), gguf.tokens[id]) != kEndOfTurn.end()) {
      return static_cast<TokenId>(id);
    }
  }
  return std::nullopt;
}

// Phi 3's tokenizer takes the blanks behind a special token to it. Files do not say so; llama.cpp goes by the name too.
bool is_phi_3(const GgufMetadata& metadata) {
  if (metadata.string("general.architecture") != "phi3") return false;
  std::string name = metadata.string("general.name").value_or("");
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name.find("phi-3") != std::string::npos || name.find("phi3") != std::string::npos;
}

}  // namespace

TokenizerData gguf_tokenizer_data(const GgufMetadata& metadata) {
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
  gguf.strips_after_special = is_phi_3(metadata);
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
    std::optional<TokenId> id = token_id(role);
    if (!id && role == std::string_view("eot")) id = spelled_end_of_turn(gguf);
    if (id && std::find(data.eos_token_ids.begin(), data.eos_token_ids.end(), *id) == data.eos_token_ids.end()) {
      data.eos_token_ids.push_back(*id);
    }
  }
  return data;
}

}  // namespace reprise::internal
