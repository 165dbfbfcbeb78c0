// What prefill, decode and the check of reuse do with tokens and caches alike. Private to `generate`.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <span>

#include "mlx/array.h"
#include "reprise/generate/generate.h"

namespace reprise::internal {

// int32 [1, L].
mlx::core::array as_row(std::span<const TokenId> ids);

int prefill_step_size(const GenerateOptions& options);

// Quantises the layers that have come to the start, after each chunk and each step, before they are evaluated.
class CacheQuantizer {
 public:
  explicit CacheQuantizer(const KVCacheOptions& options) : options_(options), done_(!options.kv_bits) {}

  void operator()(PromptCache& cache);

 private:
  KVCacheOptions options_;
  bool done_;  // no layer is left that has not come to the start
};

}  // namespace reprise::internal
