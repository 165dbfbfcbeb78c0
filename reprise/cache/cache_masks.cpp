#include "reprise/cache/cache_masks.h"

#include <string>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"

namespace reprise {

namespace {

// The cache itself, or the first child of a CacheList, however deep, that is a `Cache`; null when there is none.
template <typename Cache>
const Cache* first_of(const LayerCache& cache) {
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      if (const Cache* found = first_of<Cache>(list->child(i))) return found;
    }
    return nullptr;
  }
  return dynamic_cast<const Cache*>(&cache);
}

}  // namespace

Mask create_attention_mask(int N, const LayerCache* cache, const MaskOptions& options) {
  if (cache == nullptr) return create_attention_mask_without_cache(N, {options.return_array, options.window});
  if (const auto* attention = first_of<AttentionCache>(*cache)) return attention->make_mask(N, options);
  throw Error(ErrorCode::invalid_argument,
              "[create_attention_mask] a cache that stores keys is needed, but got " + cache->class_name());
}

Mask create_ssm_mask(int N, const LayerCache* cache) {
  if (N < 1)
    throw Error(ErrorCode::invalid_argument, "[create_ssm_mask] N must be at least 1, but got " + std::to_string(N));
  if (cache == nullptr) return NoMask{};
  if (const auto* arrays = first_of<ArraysCache>(*cache)) return arrays->make_mask(N);
  throw Error(ErrorCode::invalid_argument,
              "[create_ssm_mask] a cache of recurrent state is needed, but got " + cache->class_name());
}

}  // namespace reprise
