// What a model's caches cost, and what they are. Private to `engine`. Threads: free functions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/prompt_cache.h"
#include "reprise/kernels/paged_attention.h"
#include "reprise/models/language_model.h"

namespace reprise::internal {

// Of the code that computes rows and recurrent state. To be raised with every change after which the same weights and
// tokens give other rows, or rows in another order: a model's forward pass up to its caches, rope, norms, kernels that
// round differently, what a quantized row or a state's array means. Caches on disk of other versions are not read.
inline constexpr int kRowsVersion = 1;

struct CacheSizes {
  std::vector<kernels::PageLayout> pages;  // of each attention layer
  std::size_t state_nbytes = 0;            // recurrent state of one sequence
  std::string dtypes;                      // of logits, in words

  // A sequence's, whether or not a step runs just now: while one does, there is the state before it and that after it.
  std::size_t live_state_nbytes() const { return 2 * state_nbytes; }
  // An upper bound for a sequence that shares nothing.
  std::size_t bytes_of(int tokens) const;
};

// By the graph of one token; nothing is computed. `form`: see PrefixCache.
CacheSizes sizes_of(const LanguageModel& model, const PromptCache& form);

// The space of a prefix cache: everything that changes what rows hold, or how they are kept.
std::string space_of(const std::string& fingerprint, const CacheSizes& sizes,
                     const std::optional<KVQuantization>& quantization, int block_size);

}  // namespace reprise::internal
