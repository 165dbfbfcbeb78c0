#include "reprise/cache/batch_kv_cache.h"

#include "reprise/base/error.h"

namespace reprise {

std::unique_ptr<LayerCache> BatchKVCache::merge_rows(const std::vector<const LayerCache*>&) {
  throw Error(ErrorCode::unsupported, "[merge_caches] batches are not supported yet");
}

std::unique_ptr<LayerCache> BatchQuantizedKVCache::merge_rows(const std::vector<const LayerCache*>&) {
  throw Error(ErrorCode::unsupported, "[merge_caches] batches are not supported yet");
}

}  // namespace reprise
