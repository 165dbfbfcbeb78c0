// What a Python cache object holds: a layer's cache, and what was written to its fields since it was last used.
//
// mlx-lm's caches are plain objects: whoever likes writes `cache.keys = …`, then `cache.values = …`, then
// `cache.offset = …`. Ours never hold what does not fit together, so such writes are collected and become the contents
// at the next use other than reading or writing a field.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reprise/cache/batched_cache.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/cache/state.h"

namespace reprise::python {

class CacheObject {
 public:
  // `fields`: names of the items of the class' state, in order, and one more, the position, where the state leaves that
  // to be counted from the buffers; static.
  CacheObject(std::unique_ptr<LayerCache> cache, const std::vector<const char*>& fields)
      : cache_(std::move(cache)), fields_(&fields) {}

  // The cache with all that was written. Throws: invalid_argument, naming the fields, when that does not fit together;
  // the contents are then what they were before it was written.
  LayerCache& cache();
  template <typename Cache>
  Cache& as() {
    return dynamic_cast<Cache&>(cache());
  }
  AttentionCache& attention() { return as<AttentionCache>(); }
  BatchedCache& batch() { return as<BatchedCache>(); }

  // One item of the state, as written. Nothing is checked yet.
  State field(std::size_t item) const;
  void set_field(std::size_t item, State value);
  bool has_written_fields() const { return !written_.empty(); }
  // Without regard to what was written: for reading what no write can change.
  const LayerCache& stored() const { return *cache_; }

  // Other contents, what was written forgotten. Requires: the same class.
  void assign(std::unique_ptr<LayerCache> cache);

 private:
  // The state and, where it has no item for it, the position.
  State::List current_fields() const;
  bool is_written(std::size_t item) const;
  void commit();
  // Throws: corrupt_data or invalid_argument for what does not fit.
  std::unique_ptr<LayerCache> rebuilt(State::List fields, const std::vector<std::size_t>& written) const;

  std::unique_ptr<LayerCache> cache_;
  const std::vector<const char*>* fields_;
  State::List draft_;                 // the state with what was written; only while something is
  std::vector<std::size_t> written_;  // items, each once
};

}  // namespace reprise::python
