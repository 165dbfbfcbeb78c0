#include "reprise/cache/kv_cache.h"

#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

std::unique_ptr<KVCache> KVCache::from_state(const State& state) {
  const internal::StateReader reader("KVCache::from_state", state, {"keys", "values", "offset"});
  auto buffer = reader.columns(0, 1);
  const int offset = reader.integer(2, 0, buffer ? buffer->width() : 0);
  return from_columns(std::move(buffer), offset);
}

std::unique_ptr<KVCache> KVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("KVCache::from_legacy", state, {"keys", "values"});
  const internal::MetaReader no_items("KVCache::from_legacy", meta, {});
  auto buffer = reader.columns(0, 1);
  const int offset = buffer ? buffer->width() : 0;
  return from_columns(std::move(buffer), offset);
}

std::unique_ptr<KVCache> KVCache::from_columns(std::optional<internal::KVColumns> buffer, int offset) {
  auto cache = std::make_unique<KVCache>();
  cache->buffer_ = std::move(buffer);
  cache->offset_ = offset;
  return cache;
}

State KVCache::state() const {
  State::List items = keys_values_state(false);
  items.push_back(State(offset_));
  return items;
}

State KVCache::saved_state() const {
  State::List items = keys_values_state(true);
  items.push_back(State(offset_));
  return items;
}

State KVCache::legacy_state() const { return keys_values_state(true); }

Meta KVCache::legacy_meta() const { return {}; }

std::unique_ptr<LayerCache> KVCache::fork() const { return std::make_unique<KVCache>(*this); }

std::unique_ptr<LayerCache> KVCache::to_quantized(int group_size, int bits) const {
  auto quantized = std::make_unique<QuantizedKVCache>(group_size, bits);
  if (empty()) return quantized;
  return QuantizedKVCache::from_columns(buffer_->quantized("KVCache::to_quantized", {group_size, bits}), offset_);
}

std::unique_ptr<LayerCache> KVCache::merge(const std::vector<const LayerCache*>& caches) const {
  return BatchKVCache::merge_rows(caches);
}

void KVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<KVCache&>(earlier)); }

}  // namespace reprise
