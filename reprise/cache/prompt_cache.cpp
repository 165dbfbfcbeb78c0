#include "reprise/cache/prompt_cache.h"

#include <algorithm>
#include <utility>

#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

void check_not_negative(const char* function, int n) {
  if (n < 0) {
    throw Error(ErrorCode::invalid_argument,
                std::string("[") + function + "] n must not be negative, but got " + std::to_string(n));
  }
}

std::string layer_name(const PromptCache& cache, std::size_t layer) {
  return "layer " + std::to_string(layer) + " (" + cache[layer].class_name() + ")";
}

}  // namespace

void PromptCache::push_back(std::unique_ptr<LayerCache> layer) {
  if (layer == nullptr)
    throw Error(ErrorCode::invalid_argument, "[PromptCache::push_back] a cache is needed, but got null");
  layers_.push_back(std::move(layer));
}

void PromptCache::replace(std::size_t layer, std::unique_ptr<LayerCache> cache) {
  if (cache == nullptr || layer >= layers_.size()) {
    throw Error(ErrorCode::invalid_argument, "[PromptCache::replace] a cache and one of " +
                                                 std::to_string(layers_.size()) + " layers are needed, but got layer " +
                                                 std::to_string(layer) + (cache == nullptr ? " and null" : ""));
  }
  layers_[layer] = std::move(cache);
}

PromptCache PromptCache::fork() const {
  std::vector<std::unique_ptr<LayerCache>> layers;
  layers.reserve(layers_.size());
  for (const auto& layer : layers_) layers.push_back(layer->fork());
  return PromptCache(std::move(layers));
}

void PromptCache::eval() const {
  std::vector<mx::array> arrays;
  for (const auto& layer : layers_) layer->state().collect_arrays(arrays);
  mx::eval(std::move(arrays));
}

void PromptCache::fail_at(std::size_t layer) const {
  if (layer >= layers_.size()) {
    throw Error(ErrorCode::invalid_argument, "[PromptCache::at] the cache must have a layer " + std::to_string(layer) +
                                                 ", but got " + std::to_string(layers_.size()) + " layers");
  }
  throw Error(ErrorCode::invalid_argument, "[PromptCache::at] layer " + std::to_string(layer) +
                                               " must be of the class that the model needs, but got " +
                                               layers_[layer]->class_name());
}

PromptCache make_kv_prompt_cache(int num_layers) {
  if (num_layers < 0) {
    throw Error(ErrorCode::invalid_argument,
                "[make_kv_prompt_cache] num_layers must not be negative, but got " + std::to_string(num_layers));
  }
  PromptCache cache;
  for (int layer = 0; layer < num_layers; ++layer) cache.push_back(std::make_unique<KVCache>());
  return cache;
}

PromptCache fork_prompt_cache(const PromptCache& cache) { return cache.fork(); }

bool can_trim_prompt_cache(const PromptCache& cache) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!cache[layer].is_trimmable()) return false;
  }
  return true;
}

bool can_trim_prompt_cache(const PromptCache& cache, int n) {
  check_not_negative("can_trim_prompt_cache", n);
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    if (!cache[layer].is_trimmable() || cache[layer].max_trim() < n) return false;
  }
  return true;
}

int trim_prompt_cache(PromptCache& cache, int n) {
  check_not_negative("trim_prompt_cache", n);
  if (cache.size() == 0 || !can_trim_prompt_cache(cache)) return 0;
  int common = n;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) common = std::min(common, cache[layer].max_trim());
  if (common == 0) return 0;

  PromptCache before = cache.fork();
  try {
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      if (const int trimmed = cache[layer].trim(common); trimmed != common) {
        throw Error(ErrorCode::internal, "[trim_prompt_cache] " + layer_name(cache, layer) + " must trim " +
                                             std::to_string(common) + " tokens, but got " + std::to_string(trimmed));
      }
    }
  } catch (...) {
    cache = std::move(before);
    throw;
  }
  return common;
}

int cache_length(const PromptCache& cache) {
  int length = 0;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) length = std::max(length, cache[layer].length());
  return length;
}

std::size_t prompt_cache_nbytes(const PromptCache& cache) {
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) bytes += cache[layer].nbytes();
  return bytes;
}

void check_prompt_cache(const PromptCache& cache, std::optional<int> expected) {
  std::optional<std::size_t> first;  // the layer whose position the others must have
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    // What a class refuses to build from is what its invariants forbid.
    try {
      cache_from_state(cache[layer].class_name(), cache[layer].state());
    } catch (const Error& error) {
      throw Error(ErrorCode::failed_precondition,
                  "[check_prompt_cache] " + layer_name(cache, layer) + ": " + error.what());
    }
    const std::optional<int> position = cache[layer].position();
    if (!position) continue;
    if (expected && *position != *expected) {
      throw Error(ErrorCode::failed_precondition, "[check_prompt_cache] " + layer_name(cache, layer) +
                                                      " must be at position " + std::to_string(*expected) +
                                                      ", but got " + std::to_string(*position));
    }
    if (!first) {
      first = layer;
    } else if (*position != *cache[*first].position()) {
      throw Error(ErrorCode::failed_precondition,
                  "[check_prompt_cache] " + layer_name(cache, layer) + " must be at position " +
                      std::to_string(*cache[*first].position()) + " as " + layer_name(cache, *first) + ", but got " +
                      std::to_string(*position));
    }
  }
}

}  // namespace reprise
