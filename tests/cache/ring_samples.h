// RotatingKVCaches in every fill state, rows numbered from 0 by position.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise::cache_test {

inline std::vector<int> sorted(std::vector<int> tokens) {
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

inline std::unique_ptr<RotatingKVCache> fork_of(const RotatingKVCache& cache) {
  return std::unique_ptr<RotatingKVCache>(&dynamic_cast<RotatingKVCache&>(*cache.fork().release()));
}

// Filled by updates of these lengths.
inline RotatingKVCache filled_ring(int max_size, int keep, const std::vector<int>& lengths) {
  RotatingKVCache cache(max_size, keep);
  for (const int length : lengths) append(cache, range(*cache.position(), *cache.position() + length));
  return cache;
}

// Update lengths for a ring of 8: below, at and above max_size, chunks and single tokens, oversize chunks.
inline const std::vector<std::vector<int>> kRingFills = {{},
                                                         {1},
                                                         {3},
                                                         {7},
                                                         {8},
                                                         {1, 1, 1, 1, 1, 1, 1},
                                                         {3, 1, 1, 1, 1, 1},
                                                         {8, 1},
                                                         {8, 1, 1},
                                                         {9},
                                                         {9, 1},
                                                         {20},
                                                         {20, 1},
                                                         {20, 1, 1, 1},
                                                         {20, 5, 1},
                                                         {3, 20, 1},
                                                         {7, 1, 1, 1},
                                                         {7, 1, 1, 2},
                                                         {6, 2, 2, 2},
                                                         {7, 1, 1, 1, 1, 12},
                                                         {26},
                                                         {26, 1},
                                                         {8, 8, 8},
                                                         {1, 2, 3, 1, 4}};

}  // namespace reprise::cache_test
