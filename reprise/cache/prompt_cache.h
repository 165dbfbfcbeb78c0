// One cache per layer, in order: what a sequence remembers, and mlx-lm's functions over it.
// Threads: one object belongs to one thread at a time; eval() before handing it on.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/layer_cache.h"

namespace reprise {

class PromptCache {
 public:
  PromptCache() = default;
  explicit PromptCache(std::vector<std::unique_ptr<LayerCache>> layers) : layers_(std::move(layers)) {}
  PromptCache(PromptCache&&) noexcept = default;
  PromptCache& operator=(PromptCache&&) noexcept = default;

  std::size_t size() const { return layers_.size(); }
  LayerCache& operator[](std::size_t layer) { return *layers_[layer]; }
  const LayerCache& operator[](std::size_t layer) const { return *layers_[layer]; }
  // Throws: invalid_argument for null.
  void push_back(std::unique_ptr<LayerCache> layer);
  // Puts another cache in the layer's place (quantisation in the middle of an answer).
  // Throws: invalid_argument for null or a layer that is not there.
  void replace(std::size_t layer, std::unique_ptr<LayerCache> cache);

  // The layer as the class a model needs. Throws: invalid_argument when there is no such layer or it is of another
  // class (a cache that was loaded for another model).
  template <typename Cache>
  Cache& at(std::size_t layer) {
    if (auto* cache = layer < layers_.size() ? dynamic_cast<Cache*>(layers_[layer].get()) : nullptr) return *cache;
    fail_at(layer);
  }

  // Copies handles only: O(layers), no row is copied. Both sides are then independent.
  PromptCache fork() const;

  // Evaluates everything the layers hold.
  void eval() const;

 private:
  [[noreturn]] void fail_at(std::size_t layer) const;

  std::vector<std::unique_ptr<LayerCache>> layers_;
};

// `layers` growing caches: what a model without cache kinds of its own uses.
PromptCache make_kv_prompt_cache(int num_layers);

// mlx-lm's name for PromptCache::fork.
PromptCache fork_prompt_cache(const PromptCache& cache);

// Every layer is trimmable; true for no layers.
bool can_trim_prompt_cache(const PromptCache& cache);
// Every layer can give up n tokens and keep all that the shorter history needs. Throws: invalid_argument for n < 0.
bool can_trim_prompt_cache(const PromptCache& cache, int n);

// Every layer keeps all its rows by itself, so that any shorter history is a trim away; true for no layers.
bool keeps_all_rows(const PromptCache& cache);

// Trims every layer by the same m = min(n, smallest max_trim). Returns: m; 0 for no layers or a layer that cannot trim.
// On error nothing has changed. Throws: invalid_argument for n < 0.
int trim_prompt_cache(PromptCache& cache, int n);

// Puts the quantised counterpart in the place of every layer (also inside a CacheList) that has one and whose position
// is at least `start`; the others stay. All or nothing. Throws: invalid_argument for start < 0 and as to_quantized,
// naming the layer.
void maybe_quantize_kv_cache(PromptCache& cache, int start, int group_size, int bits);

// Largest length() of the layers; 0 for none.
int cache_length(const PromptCache& cache);

std::size_t prompt_cache_nbytes(const PromptCache& cache);

// Of batches, layer by layer: as the operations of BatchedCache. A call that throws leaves all arguments as they were;
// only references to layers of `cache` are void then. Throw, besides: invalid_argument for another number of layers or
// other classes; unsupported for a layer without batch operations.
PromptCache merge_prompt_caches(const std::vector<const PromptCache*>& caches);
PromptCache extract_prompt_cache(const PromptCache& cache, int row);
// No layers on either side: the result is the other side.
void extend_prompt_cache(PromptCache& cache, const PromptCache& other);
void filter_prompt_cache(PromptCache& cache, const std::vector<int>& rows);
void prepare_prompt_cache(PromptCache& cache, const BatchPrompt& prompt);
void finalize_prompt_cache(PromptCache& cache);
// After each piece of N columns of a prepared prompt. Passes over a layer without batch operations. Throws:
// invalid_argument for N < 0.
void advance_prompt_cache(PromptCache& cache, int N);

// Throws: failed_precondition, naming layer and child, when layers or children of a CacheList that know positions (one,
// or one per row) disagree, differ from `expected`, or break what their class promises.
void check_prompt_cache(const PromptCache& cache, std::optional<int> expected = {});

}  // namespace reprise
