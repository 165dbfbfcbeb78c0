#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/layer_cache.h"

namespace reprise {

class BatchKVCache {
 public:
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);
};

class BatchQuantizedKVCache {
 public:
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);
};

}  // namespace reprise
