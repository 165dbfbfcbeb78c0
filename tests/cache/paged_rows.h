// Paged caches whose rows carry token numbers, and what attention must give over them.
// Threads: free functions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/paged_batch.h"
#include "reprise/cache/paged_kv_cache.h"

namespace reprise::cache_test {

inline constexpr int kPagedHeads = 2, kPagedSize = 32;

// One step of rows of equally many tokens: keys and values carry them, queries are 0, so that each query gives the mean
// of the tokens it sees. Returns: attention's output, not evaluated.
mlx::core::array step_of_tokens(AttentionCache& cache, const std::vector<std::vector<int>>& tokens);
// Those means, batch row by batch row.
std::vector<std::vector<float>> means_of(const mlx::core::array& output);
std::vector<std::vector<float>> means_of_step(AttentionCache& cache, const std::vector<std::vector<int>>& tokens);

// These tokens in steps of 50; a cache of the tokens 0 … length - 1.
void feed_pages(PagedKVCache& cache, const std::vector<int>& tokens);
PagedKVCache filled_pages(const std::shared_ptr<PagePool>& pool, int length, kernels::PagedVisibility visibility = {});

// The mean of the tokens that the one at `position` sees.
float mean_seen(const std::vector<int>& tokens, int position, const kernels::PagedVisibility& visibility);

// The tokens of the rows that are there; keys and values must agree.
std::vector<int> tokens_of_rows(const AttentionCache& cache);

// Normal numbers, the same for a seed and shape; drawn once for all.
mlx::core::array random_numbers(const mlx::core::Shape& shape, std::uint64_t seed);

// Addresses of the pages of all rows that are there.
std::vector<const std::byte*> page_addresses(const PagedKVCache& cache);

}  // namespace reprise::cache_test
