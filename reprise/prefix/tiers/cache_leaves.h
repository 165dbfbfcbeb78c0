// The caches of a prompt cache one after another, children of CacheLists in place of the lists: pages of attention
// layers, and recurrent state.
// Threads: free functions; what they return is void once the prompt cache's layers are replaced.
#pragma once

#include <vector>

#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/prompt_cache.h"

namespace reprise {

std::vector<LayerCache*> leaves_of(PromptCache& cache);
std::vector<const LayerCache*> leaves_of(const PromptCache& cache);

// Those of one class, in order.
std::vector<PagedKVCache*> paged_leaves(PromptCache& cache);
std::vector<const PagedKVCache*> paged_leaves(const PromptCache& cache);
std::vector<ArraysCache*> recurrent_leaves(PromptCache& cache);
std::vector<const ArraysCache*> recurrent_leaves(const PromptCache& cache);

}  // namespace reprise
