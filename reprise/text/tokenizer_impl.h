// Private to text: what a Tokenizer and its Detokenizers share.
// Threads: immutable.
#pragma once

#include <optional>
#include <vector>

#include "reprise/text/textkit_call.h"
#include "reprise/text/tokenizer.h"

namespace reprise {

struct Tokenizer::Impl {
  internal::TextkitTokenizer textkit;
  std::optional<TokenId> bos_token_id;
  std::vector<TokenId> eos_token_ids;
};

}  // namespace reprise
