#include "reprise/cache/quantized_kv_cache.h"

#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

QuantizedKVCache::QuantizedKVCache(int group_size, int bits) : GrowingCache(KVQuantization{group_size, bits}) {
  internal::check_quantization("QuantizedKVCache", *quantization_);
}

std::unique_ptr<QuantizedKVCache> QuantizedKVCache::from_state(const State& state) {
  const internal::StateReader reader("QuantizedKVCache::from_state", state,
                                     {"keys", "values", "offset", "group_size", "bits"});
  const KVQuantization quantization = reader.quantization(3, 4);
  auto buffer = reader.columns(0, 1, quantization);
  const int offset = reader.integer(2, 0, buffer ? buffer->width() : 0);
  if (buffer) return from_columns(std::move(*buffer), offset);
  return std::make_unique<QuantizedKVCache>(quantization.group_size, quantization.bits);
}

std::unique_ptr<QuantizedKVCache> QuantizedKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("QuantizedKVCache::from_legacy", state, {"keys", "values"});
  const internal::MetaReader numbers("QuantizedKVCache::from_legacy", meta, {"offset", "group_size", "bits"});
  const KVQuantization quantization = numbers.quantization(1, 2);
  auto buffer = reader.columns(0, 1, quantization);
  const int offset = numbers.integer(0, 0, buffer ? buffer->width() : 0);
  if (buffer) return from_columns(std::move(*buffer), offset);
  return std::make_unique<QuantizedKVCache>(quantization.group_size, quantization.bits);
}

std::unique_ptr<QuantizedKVCache> QuantizedKVCache::from_columns(internal::KVColumns buffer, int offset) {
  auto cache = std::make_unique<QuantizedKVCache>(buffer.quantization()->group_size, buffer.quantization()->bits);
  cache->buffer_ = std::move(buffer);
  cache->offset_ = offset;
  return cache;
}

State QuantizedKVCache::state() const {
  State::List items = keys_values_state(false);
  for (int number : {offset_, group_size(), bits()}) items.push_back(State(number));
  return items;
}

State QuantizedKVCache::saved_state() const {
  State::List items = keys_values_state(true);
  for (int number : {offset_, group_size(), bits()}) items.push_back(State(number));
  return items;
}

State QuantizedKVCache::legacy_state() const { return keys_values_state(true); }

Meta QuantizedKVCache::legacy_meta() const {
  Meta::List items;
  for (int number : {offset_, group_size(), bits()}) items.push_back(Meta(std::to_string(number)));
  return items;
}

std::unique_ptr<LayerCache> QuantizedKVCache::fork() const { return std::make_unique<QuantizedKVCache>(*this); }

std::unique_ptr<LayerCache> QuantizedKVCache::to_dequantized() const {
  return KVCache::from_columns(empty() ? std::nullopt : std::optional(buffer_->dequantized()), offset_);
}

std::unique_ptr<LayerCache> QuantizedKVCache::merge(const std::vector<const LayerCache*>& caches) const {
  return BatchQuantizedKVCache::merge_rows(caches);
}

void QuantizedKVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<QuantizedKVCache&>(earlier)); }

}  // namespace reprise
