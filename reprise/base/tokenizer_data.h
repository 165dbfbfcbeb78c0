// A tokenizer as plain data: what `storage` finds in a model file and `text` builds a Tokenizer from, so that the
// two rooms need not meet.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"

namespace reprise {

// The tokenizer fields of a GGUF file (`tokenizer.ggml.*`), verbatim.
struct GgufTokenizerData {
  std::string model;                // "gpt2" (byte-level BPE), "llama" (SentencePiece BPE), …
  std::string pre;                  // name of the pre-tokenizer ("smollm", "llama-bpe", …); empty when absent
  std::vector<std::string> tokens;  // [V] text of each id
  std::vector<float> scores;        // [V] or empty
  std::vector<int> token_types;     // [V] or empty: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<std::string> merges;  // "left right", best first; empty for SentencePiece
  std::optional<bool> add_bos_token;
  std::optional<bool> add_eos_token;
  std::optional<bool> add_space_prefix;
  std::optional<TokenId> unknown_token_id;
  bool strips_after_special = false;  // blanks behind a special token in a text belong to it (Phi 3)
};

// Exactly one of `tokenizer_json` and `gguf` is set.
struct TokenizerData {
  std::string tokenizer_json;  // text of a Hugging Face tokenizer.json
  std::optional<GgufTokenizerData> gguf;

  std::string chat_template;  // Jinja source; empty when the model has none
  std::optional<TokenId> bos_token_id;
  std::vector<TokenId> eos_token_ids;  // every id that ends an answer, the tokenizer's own first
  std::string bos_token;               // texts of the special tokens as the template sees them; empty when absent
  std::string eos_token;
  std::string unk_token;
  std::string pad_token;
};

}  // namespace reprise
