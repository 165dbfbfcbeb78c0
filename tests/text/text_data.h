// The goldens in tests/data/text, and tokenizers made of them.
#pragma once

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "reprise/base/sha256.h"
#include "reprise/base/tokenizer_data.h"

namespace reprise::testing {

using json = nlohmann::ordered_json;

inline std::string read_text_data(const std::string& name) {
  std::ifstream file(std::string(REPRISE_SOURCE_DIR) + "/tests/data/text/" + name, std::ios::binary);
  if (!file) throw std::runtime_error("no golden " + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline json read_golden(const std::string& name) { return json::parse(read_text_data(name)); }

// The goldens' short hash.
inline std::string short_hash(const std::string& text) { return sha256_hex(text).substr(0, 16); }

// The tiny byte-level BPE as its tokenizer.json.
inline TokenizerData byte_level_json(const json& golden) {
  TokenizerData data;
  data.tokenizer_json = golden.at("tokenizer").dump();
  return data;
}

// The same as a GGUF file would have it.
inline TokenizerData byte_level_gguf(const json& golden, const std::string& pre) {
  GgufTokenizerData gguf;
  gguf.model = "gpt2";
  gguf.pre = pre;
  const json& tokenizer = golden.at("tokenizer");
  std::map<std::size_t, std::string> tokens;
  for (const auto& [token, id] : tokenizer.at("model").at("vocab").items()) tokens[id] = token;
  for (const auto& [id, token] : tokens) gguf.tokens.push_back(token);
  gguf.token_types.assign(tokens.size(), 1);
  for (const auto& added : tokenizer.at("added_tokens")) {
    gguf.token_types.at(added.at("id")) = added.at("special") ? 3 : 4;
  }
  for (const auto& merge : tokenizer.at("model").at("merges")) {
    gguf.merges.push_back(merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>());
  }
  TokenizerData data;
  data.gguf = gguf;
  return data;
}

// The tiny SentencePiece model as a GGUF file would have it.
inline TokenizerData sentencepiece_gguf(const json& golden, bool add_space_prefix) {
  GgufTokenizerData gguf;
  gguf.model = "llama";
  gguf.tokens = golden.at("tokens").get<std::vector<std::string>>();
  gguf.scores = golden.at("scores").get<std::vector<float>>();
  gguf.token_types = golden.at("types").get<std::vector<int>>();
  gguf.unknown_token_id = 0;
  gguf.add_space_prefix = add_space_prefix;
  TokenizerData data;
  data.gguf = gguf;
  data.bos_token_id = 1;
  data.eos_token_ids = {2};
  return data;
}

}  // namespace reprise::testing
