#include "reprise/cache/concatenate_kv_cache.h"

#include "reprise/cache/state_reader.h"

namespace reprise {

std::unique_ptr<ConcatenateKVCache> ConcatenateKVCache::from_state(const State& state) {
  const internal::StateReader reader("ConcatenateKVCache::from_state", state, {"keys", "values"});
  auto cache = std::make_unique<ConcatenateKVCache>();
  cache->buffer_ = reader.columns(0, 1);
  cache->offset_ = cache->buffer_ ? cache->buffer_->width() : 0;
  return cache;
}

std::unique_ptr<ConcatenateKVCache> ConcatenateKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::MetaReader no_items("ConcatenateKVCache::from_legacy", meta, {});
  return from_state(state);
}

State ConcatenateKVCache::state() const {
  if (empty()) return keys_values_state(false);
  const internal::KVColumns rows = buffer_->first(offset_);
  return State::List{rows.keys_state(), rows.values_state()};
}

State ConcatenateKVCache::saved_state() const { return keys_values_state(true); }

State ConcatenateKVCache::legacy_state() const { return keys_values_state(true); }

Meta ConcatenateKVCache::legacy_meta() const { return {}; }

std::unique_ptr<LayerCache> ConcatenateKVCache::fork() const { return std::make_unique<ConcatenateKVCache>(*this); }

mlx::core::array ConcatenateKVCache::attend(const mlx::core::array& queries, const mlx::core::array& keys,
                                            const mlx::core::array& values, const AttentionOptions& options) {
  return attend_in_parts(queries, keys, values, options);
}

mlx::core::array ConcatenateKVCache::attend_projections(const Projections& projections,
                                                        const AttentionOptions& options) {
  return attend_projections_in_parts(projections, options);
}

internal::KVColumns ConcatenateKVCache::appended(const internal::KVColumns& rows) const {
  // The first rows may be a view of something larger.
  if (offset_ == 0) return rows.contiguous();
  return internal::concatenate_columns({buffer_->first(offset_), rows});
}

void ConcatenateKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<ConcatenateKVCache&>(earlier));
}

}  // namespace reprise
