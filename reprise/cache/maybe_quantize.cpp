#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/prompt_cache.h"

namespace reprise {

namespace {

struct Replacement {
  CacheList* list;  // null: the layer itself
  std::size_t index;
  std::unique_ptr<LayerCache> cache;
};

struct Request {
  int start;
  int group_size;
  int bits;
};

// Null where the cache has not come to the start or stays as it is.
std::unique_ptr<LayerCache> counterpart(const LayerCache& cache, const Request& request) {
  if (!cache.has_quantized_counterpart()) return nullptr;
  const std::vector<int> positions = cache.positions();
  const auto reached = [&](int position) { return position >= request.start; };
  if (positions.empty() || !std::all_of(positions.begin(), positions.end(), reached)) return nullptr;
  return cache.to_quantized(request.group_size, request.bits);
}

void collect(LayerCache& cache, CacheList* list, std::size_t index, const Request& request,
             std::vector<Replacement>& replacements) {
  if (auto* inner = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < inner->num_children(); ++i) {
      collect(inner->child(i), inner, i, request, replacements);
    }
  } else if (auto quantized = counterpart(cache, request)) {
    replacements.push_back({list, index, std::move(quantized)});
  }
}

}  // namespace

void maybe_quantize_kv_cache(PromptCache& cache, int start, int group_size, int bits) {
  if (start < 0) {
    throw Error(ErrorCode::invalid_argument,
                "[maybe_quantize_kv_cache] start must not be negative, but got " + std::to_string(start));
  }
  std::vector<Replacement> replacements;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    try {
      collect(cache[layer], nullptr, layer, {start, group_size, bits}, replacements);
    } catch (const Error& error) {
      throw Error(error.code(), "[maybe_quantize_kv_cache] layer " + std::to_string(layer) + " (" +
                                    cache[layer].class_name() + "): " + error.what());
    }
  }
  for (Replacement& replacement : replacements) {
    if (replacement.list != nullptr) {
      replacement.list->replace(replacement.index, std::move(replacement.cache));
    } else {
      cache.replace(replacement.index, std::move(replacement.cache));
    }
  }
}

}  // namespace reprise
