// Small caches for a store of prompt caches, and the tokens that they hold.
// Threads: free functions.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "reprise/cache/lru_prompt_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise::cache_test {

inline constexpr std::size_t kWidth = 256;  // columns of a short KVCache

// Two growing layers that hold these tokens; `size` varies the bytes.
inline PromptCache holding(const Tokens& tokens, int size = 1) {
  PromptCache cache = make_kv_prompt_cache(2);
  append(cache, tokens, {.heads = 1, .key_size = size, .value_size = size});
  return cache;
}

inline std::size_t bytes_of(int size) { return 2 * 2 * kWidth * sizeof(float) * static_cast<std::size_t>(size); }

// A ring: it can only be trimmed while it has fewer rows than `max_size`.
inline PromptCache ring_holding(const Tokens& tokens, int max_size = 4) {
  PromptCache cache;
  cache.push_back(std::make_unique<RotatingKVCache>(max_size));
  append(cache, tokens, {.heads = 1, .key_size = 1, .value_size = 1});
  return cache;
}

inline std::vector<int> tokens_in(PromptCache& cache) {
  const auto tokens = tokens_of(cache.at<AttentionCache>(0).keys_and_values());
  for (std::size_t layer = 1; layer < cache.size(); ++layer) {
    EXPECT_EQ(tokens_of(cache.at<AttentionCache>(layer).keys_and_values()), tokens);
  }
  return tokens;
}

}  // namespace reprise::cache_test
