#include <memory>
#include <string>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/models/language_model.h"

namespace reprise {
namespace {

constexpr int kKeep = 4;  // first tokens that a bounded layer never evicts; mlx-lm's number

std::string in_words(const KVQuantization& quantization) {
  return std::to_string(quantization.bits) + " bits, groups of " + std::to_string(quantization.group_size);
}

std::string ring_in_words(const internal::RingCache& ring) {
  const std::string size = std::to_string(ring.max_size());
  return ring.keep() > 0 ? size + ", keep " + std::to_string(ring.keep()) : size;
}

// What takes the place of an empty layer that would keep all rows, or of a list with such a child; null for another.
std::unique_ptr<LayerCache> bounded_layer(const LayerCache& layer, int max_kv_size) {
  if (const auto* list = dynamic_cast<const CacheList*>(&layer)) {
    CacheList::Children children;
    bool any = false;
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      auto bounded = bounded_layer(list->child(i), max_kv_size);
      any = any || bounded != nullptr;
      children.push_back(bounded ? std::move(bounded) : list->child(i).fork());
    }
    return any ? std::make_unique<CacheList>(std::move(children)) : nullptr;
  }
  const bool grows = layer.class_name() == KVCache::kClassName || layer.class_name() == ConcatenateKVCache::kClassName;
  return grows ? std::make_unique<RotatingKVCache>(max_kv_size, kKeep) : nullptr;
}

}  // namespace

std::string describe_cache(const LayerCache& cache) {
  std::string details;
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      details += (i > 0 ? ", " : "") + describe_cache(list->child(i));
    }
  }
  if (const auto* chunked = dynamic_cast<const FrontTrimmedCache*>(&cache)) {
    details = std::to_string(chunked->chunk_size());
  }
  if (const auto* ring = dynamic_cast<const internal::RingCache*>(&cache)) details = ring_in_words(*ring);
  if (const auto* quantized = dynamic_cast<const QuantizedKVCache*>(&cache)) {
    details = in_words({quantized->group_size(), quantized->bits()});
  }
  if (const auto* quantized = dynamic_cast<const QuantizedRotatingKVCache*>(&cache)) {
    details += "; " + in_words({quantized->group_size(), quantized->bits()});
  }
  return cache.class_name() + (details.empty() ? "" : "(" + details + ")");
}

PromptCache make_prompt_cache(const LanguageModel& model, std::optional<int> max_kv_size,
                              std::vector<LayerCacheChoice>* choices) {
  if (max_kv_size && *max_kv_size <= kKeep) {
    throw Error(ErrorCode::invalid_argument,
                "[make_prompt_cache] max_kv_size must be more than the " + std::to_string(kKeep) +
                    " first tokens that are always kept, but got " + std::to_string(*max_kv_size));
  }
  PromptCache cache = model.make_cache();
  if (choices != nullptr) choices->clear();
  for (std::size_t i = 0; i < cache.size(); ++i) {
    std::unique_ptr<LayerCache> bounded;
    if (max_kv_size) bounded = bounded_layer(cache[i], *max_kv_size);
    const bool is_bounded = bounded != nullptr;
    if (is_bounded) cache.replace(i, std::move(bounded));
    if (choices != nullptr) choices->push_back({describe_cache(cache[i]), is_bounded});
  }
  return cache;
}

}  // namespace reprise
