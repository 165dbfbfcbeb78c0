// Private to text: ids to UTF-8, one id after the other. Tokenizer::decode and Detokenizer both run it, so they agree.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "reprise/text/textkit_call.h"
#include "reprise/text/tokenizer.h"

namespace reprise::internal {

// Bytes to UTF-8 as WHATWG has it: every maximal part that is no character becomes one U+FFFD. Holds back a character
// that may still become whole.
class Utf8Stream {
 public:
  void add(std::string_view bytes, std::string& out);
  // What is held back can no longer become a character.
  void finish(std::string& out);

 private:
  std::string held_;  // at most three bytes: the start of a character
};

class Decoder {
 public:
  // `tokenizer` must outlive the object.
  Decoder(const textkit_tokenizer* tokenizer, DecodeOptions options);

  // Appends what has become certain to `out`. Ids outside the vocabulary add nothing.
  void add(TokenId id, std::string& out);

  // Appends what was held back. Afterwards the object is as new.
  void finish(std::string& out);

 private:
  const textkit_tokenizer* tokenizer_;
  DecodeOptions options_;
  bool first_ = true;       // no token has been added yet
  std::size_t strip_left_;  // spaces still to be taken off the start of the text
  Utf8Stream utf8_;
};

}  // namespace reprise::internal
