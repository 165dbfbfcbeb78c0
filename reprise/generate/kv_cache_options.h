// How many rows a prompt cache keeps and how exactly: what the model's own caches become on request.
// Threads: free functions; the model is only read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/prompt_cache.h"
#include "reprise/models/language_model.h"

namespace reprise {

struct KVCacheOptions {
  std::optional<int> max_kv_size = {};  // > 4; see make_prompt_cache
  // 2, 3, 4, 5, 6 or 8: keys and values are quantised once `quantized_kv_start` tokens are cached. None: never.
  std::optional<int> kv_bits = {};
  int kv_group_size = 64;  // 32, 64 or 128; must divide the head sizes
  int quantized_kv_start = 5000;
  bool operator==(const KVCacheOptions&) const = default;
};

// Throws: invalid_argument, naming the number that is out of its range and what may stand there.
void check_kv_cache_options(const KVCacheOptions& options);

// What `options` will do with each layer of `cache`, in a person's words, decided before a token is computed. Cost:
// builds the graph of one step or two, computes nothing. Throws: as check_kv_cache_options; invalid_argument when the
// group size does not divide a layer's head size (the message says which would); unsupported when no layer can be
// quantised, or the model cannot attend to quantised layers.
std::vector<std::string> plan_kv_cache(const LanguageModel& model, const PromptCache& cache,
                                       const KVCacheOptions& options);

// The same text per layer as lines: "layers 0-2, 5: KVCache".
std::string summarize_layers(const std::vector<std::string>& layers);

}  // namespace reprise
