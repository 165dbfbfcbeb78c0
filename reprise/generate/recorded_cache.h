// A prompt cache with the ids of what it holds, and how it follows a prompt that goes another way.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <span>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/snapshots.h"
#include "reprise/generate/kv_cache_options.h"
#include "reprise/models/language_model.h"

namespace reprise {

// Invariant, at every exit of every function of `generate`: tokens.size() is the cache's position, and row i holds
// tokens[i], as far as the cache keeps row i.
struct RecordedCache {
  PromptCache cache;
  Tokens tokens;
  // In which pieces the last of `tokens` were fed, oldest first: what a bounded cache holds depends on them. They may
  // begin after the first token: how those before came is then not known.
  std::vector<int> pieces = {};

  RecordedCache fork() const { return {cache.fork(), tokens, pieces}; }
};

// Brings `cache` to the longest prefix it shares with `ids` that can be kept, at least one token short of `ids`: that
// one is computed for its logits. A cache that cannot be cut back goes back to the newest of `snapshots` before that
// point, else becomes an empty one of the kinds that model and `options` ask for. Snapshots of what is given up are
// forgotten. Requires: ids is not empty.
void keep_common_prefix(const LanguageModel& model, RecordedCache& cache, std::span<const TokenId> ids,
                        const KVCacheOptions& options = {}, Snapshots* snapshots = nullptr);

}  // namespace reprise
