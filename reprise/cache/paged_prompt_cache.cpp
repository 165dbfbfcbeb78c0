// Paged caches of mlx-lm's classes, and back.
#include <algorithm>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/paged_checks.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"

namespace reprise {

using internal::fail_paged;

namespace {

using Quantization = std::optional<KVQuantization>;

kernels::PagedVisibility window_of(const std::string& name, const internal::RingCache& ring) {
  if (ring.keep() > 0) {
    fail_paged("make_paged_prompt_cache", name + " must not keep its first tokens", std::to_string(ring.keep()),
               ErrorCode::unsupported);
  }
  return {.window = ring.max_size()};
}

// A layer, or a child of a CacheList, by whatever makes one of it.
template <typename Convert>
std::unique_ptr<LayerCache> converted(const std::string& name, const LayerCache& cache, const Convert& convert) {
  const auto* list = dynamic_cast<const CacheList*>(&cache);
  if (list == nullptr) return convert(name + " (" + cache.class_name() + ")", cache);
  CacheList::Children children;
  for (std::size_t i = 0; i < list->num_children(); ++i) {
    children.push_back(converted(name + ", child " + std::to_string(i), list->child(i), convert));
  }
  return std::make_unique<CacheList>(std::move(children));
}

template <typename Convert>
PromptCache convert_all(const PromptCache& cache, const Convert& convert) {
  PromptCache result;
  for (std::size_t i = 0; i < cache.size(); ++i) {
    result.push_back(converted("layer " + std::to_string(i), cache[i], convert));
  }
  return result;
}

}  // namespace

std::unique_ptr<LayerCache> PagedKVCache::plain() const {
  const auto& [window, chunk] = visibility_;
  if (chunk > 0 && (window > 0 || quantization_)) {
    fail_paged("PagedKVCache::plain", "rows must be of a class that files know",
               quantization_ ? "quantised chunks" : "chunks with a window", ErrorCode::unsupported);
  }
  // A ring has no more columns than it sees.
  const int begin = window > 0 ? std::max(first_row(), offset_ - window) : first_row();
  std::optional<internal::KVColumns> rows;
  if (layout_) rows = columns(begin, offset_);
  const int count = offset_ - begin;
  if (window > 0) {
    if (!quantization_) return RotatingKVCache::from_columns(window, 0, std::move(rows), offset_, count);
    return QuantizedRotatingKVCache::from_columns(window, 0, *quantization_, std::move(rows), offset_, count);
  }
  if (chunk > 0) {
    auto chunked = ChunkedKVCache::from_columns(chunk, std::move(rows));
    chunked->begin_at(begin);
    return chunked;
  }
  if (!quantization_) return KVCache::from_columns(std::move(rows), offset_);
  if (rows) return QuantizedKVCache::from_columns(*std::move(rows), offset_);
  return std::make_unique<QuantizedKVCache>(quantization_->group_size, quantization_->bits);
}

PromptCache make_paged_prompt_cache(const PromptCache& cache, const std::shared_ptr<PagePool>& pool,
                                    const Quantization& quantization) {
  return convert_all(cache, [&](const std::string& name, const LayerCache& layer) -> std::unique_ptr<LayerCache> {
    if (!layer.empty()) fail_paged("make_paged_prompt_cache", name + " must be empty", std::to_string(layer.length()));
    const auto paged = [&](const kernels::PagedVisibility& visibility, const Quantization& of_rows) {
      return std::make_unique<PagedKVCache>(pool, visibility, of_rows);
    };
    const std::string kind = layer.class_name();
    if (dynamic_cast<const ArraysCache*>(&layer) != nullptr) return layer.fork();
    if (kind == KVCache::kClassName || kind == ConcatenateKVCache::kClassName) return paged({}, quantization);
    if (const auto* growing = dynamic_cast<const QuantizedKVCache*>(&layer)) {
      return paged({}, KVQuantization{growing->group_size(), growing->bits()});
    }
    if (const auto* ring = dynamic_cast<const RotatingKVCache*>(&layer)) {
      return paged(window_of(name, *ring), quantization);
    }
    if (const auto* ring = dynamic_cast<const QuantizedRotatingKVCache*>(&layer)) {
      return paged(window_of(name, *ring), KVQuantization{ring->group_size(), ring->bits()});
    }
    if (const auto* chunks = dynamic_cast<const ChunkedKVCache*>(&layer)) {
      return paged({.chunk = chunks->chunk_size()}, std::nullopt);
    }
    fail_paged("make_paged_prompt_cache", "layers must be of a class that pages can stand for", name,
               ErrorCode::unsupported);
  });
}

PromptCache make_plain_prompt_cache(const PromptCache& cache) {
  return convert_all(cache, [](const std::string&, const LayerCache& layer) {
    const auto* paged = dynamic_cast<const PagedKVCache*>(&layer);
    return paged != nullptr ? paged->plain() : layer.fork();
  });
}

}  // namespace reprise
