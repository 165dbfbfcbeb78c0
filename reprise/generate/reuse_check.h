// Whether what was reused is what would have been computed: a cold run beside the warm one. Private to `generate`.
// Threads: free functions; a call evaluates on the calling thread.
#pragma once

#include <optional>

#include "reprise/generate/generate.h"

namespace reprise::internal {

// A part of `rate` (0 … 1) of all caches is chosen, by their tokens: a repeated run checks the same ones.
bool is_chosen_for_check(const RecordedCache& warm, double rate);

struct ReuseCheck {
  double error = 0;                                   // max|warm - cold| / max|cold| of the next token's logits
  double tolerance = 0;                               // of what the cache stores and computes in
  PromptCache cold;                                   // the same tokens as the warm cache, computed from nothing
  bool agrees() const { return error <= tolerance; }  // false for what is not a number
};

// Computes the tokens of `warm` again in the pieces in which they came (together where no layer depends on them), and
// compares what both say after `last`. None: cancelled. Neither `warm` nor what it shares is changed.
std::optional<ReuseCheck> check_reuse(const LanguageModel& model, const RecordedCache& warm, TokenId last,
                                      const GenerateOptions& options);

}  // namespace reprise::internal
