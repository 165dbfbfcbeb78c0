// Sampled ids as text, and the decision when an answer ends: for generate and the engine alike.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/text/tokenizer.h"

namespace reprise {

struct AnswerTextOptions {
  std::vector<TokenId> stop_tokens = {};  // in addition to the tokenizer's end-of-answer ids
  bool ignore_eos = false;                // the tokenizer's ids do not stop
  std::vector<std::string> stop = {};     // matched on the text; held back until certain; not part of the text
};

class AnswerText {
 public:
  // Shares the tokenizer's data. Throws: invalid_argument for an empty stop string.
  AnswerText(const Tokenizer& tokenizer, const AnswerTextOptions& options);
  ~AnswerText();
  AnswerText(AnswerText&&) noexcept;
  AnswerText& operator=(AnswerText&&) noexcept;

  struct Piece {
    std::string text;    // that has become certain; often empty
    bool ended = false;  // the answer ends with this token
  };
  Piece add(TokenId token);

  // Returns: what was still held back.
  std::string finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
