// A stored prefix beside the same tokens computed from nothing. Private to `engine`.
// Threads: a call evaluates on the calling thread.
#pragma once

#include <span>

#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/models/language_model.h"

namespace reprise::internal {

struct ColdCheck {
  double error = 0;  // see reuse_error
  double tolerance = 0;
  PromptCache cold;                                   // the tokens of `prefix`, computed from nothing
  bool agrees() const { return error <= tolerance; }  // false for what is not a number
};

// Computes `prefix`, which `warm` holds, again over `form`, and compares what both say after `next`. Throws: what
// evaluation throws. Nothing that `warm` shows is changed.
ColdCheck check_against_cold(const LanguageModel& model, const PromptCache& form, const PromptCache& warm,
                             std::span<const TokenId> prefix, TokenId next);

}  // namespace reprise::internal
