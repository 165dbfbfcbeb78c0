// Streaming detokenizer: ids in, UTF-8 out, never half a character. The pieces joined equal Tokenizer::decode of all
// ids (up to a trailing incomplete character, which finish() gives as U+FFFD).
// Threads: one object belongs to one thread at a time. Cost: O(1) amortised per id, whatever the length so far.
#pragma once

#include <memory>
#include <string>

#include "reprise/base/tokens.h"
#include "reprise/text/tokenizer.h"

namespace reprise {

class Detokenizer {
 public:
  // Shares the tokenizer's data; the Tokenizer itself may go first.
  explicit Detokenizer(const Tokenizer& tokenizer, DecodeOptions options = {.skip_special_tokens = true});
  ~Detokenizer();
  Detokenizer(Detokenizer&&) noexcept;
  Detokenizer& operator=(Detokenizer&&) noexcept;

  // Returns: the text that has become certain with this id; often empty in the middle of a character.
  std::string add(TokenId id);

  // Returns: what was still held back. Afterwards the object is as new.
  std::string finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
