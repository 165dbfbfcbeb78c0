// Text to token ids and back: the C++ face of the Hugging Face tokenizers in rust/textkit.
// Threads: a Tokenizer is immutable after construction; any thread may use it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reprise/base/tokenizer_data.h"
#include "reprise/base/tokens.h"

namespace reprise {

struct EncodeOptions {
  // Adds what the tokenizer's post-processor adds (BOS and the like). Off for rendered chat templates, which spell
  // their special tokens out.
  bool add_special_tokens = false;
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

class Tokenizer {
 public:
  // Throws: corrupt_data when the tokenizer cannot be parsed, unsupported (naming it) for a GGUF tokenizer model or
  // pre-tokenizer that is not known.
  explicit Tokenizer(const TokenizerData& data);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // `text` is UTF-8; special tokens spelled out in it become their ids. Throws: invalid_argument when it is not UTF-8.
  Tokens encode(std::string_view text, EncodeOptions options = {}) const;

  // Bytes that are no complete character become U+FFFD. Ids outside the vocabulary are skipped.
  std::string decode(std::span<const TokenId> ids, DecodeOptions options = {}) const;

  std::optional<TokenId> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(TokenId id) const;
  bool is_special(TokenId id) const;

  // Number of ids, added tokens included.
  std::size_t vocab_size() const;

  std::optional<TokenId> bos_token_id() const;
  // Every id that ends an answer; may be empty.
  const std::vector<TokenId>& eos_token_ids() const;

 private:
  friend class Detokenizer;
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace reprise
