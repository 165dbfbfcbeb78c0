#include "reprise/cache/quantized_rotating_kv_cache.h"

#include <limits>

#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kAnyInt = std::numeric_limits<int>::max();

std::optional<int> width_of(const std::optional<internal::KVColumns>& columns) {
  return columns ? std::optional(columns->width()) : std::nullopt;
}

}  // namespace

QuantizedRotatingKVCache::QuantizedRotatingKVCache(int max_size, int keep, int group_size, int bits)
    : RingCache("QuantizedRotatingKVCache", max_size, keep, KVQuantization{group_size, bits}) {
  internal::check_quantization("QuantizedRotatingKVCache", *quantization_);
}

std::unique_ptr<QuantizedRotatingKVCache> QuantizedRotatingKVCache::from_state(const State& state) {
  constexpr const char* kFunction = "QuantizedRotatingKVCache::from_state";
  const internal::StateReader reader(kFunction, state,
                                     {"keys", "values", "offset", "keep", "max_size", "idx", "group_size", "bits"});
  const KVQuantization quantization = reader.quantization(6, 7);
  auto columns = reader.columns(0, 1, quantization);
  const internal::RingNumbers numbers{.offset = reader.integer(2, 0, kAnyInt),
                                      .keep = reader.integer(3, 0, kAnyInt),
                                      .max_size = reader.integer(4, 1, kAnyInt),
                                      .idx = reader.integer(5, 0, kAnyInt)};
  internal::check_ring(kFunction, width_of(columns), numbers);
  return from_columns(numbers.max_size, numbers.keep, quantization, std::move(columns), numbers.offset, numbers.idx);
}

std::unique_ptr<QuantizedRotatingKVCache> QuantizedRotatingKVCache::from_legacy(const State& state, const Meta& meta) {
  constexpr const char* kFunction = "QuantizedRotatingKVCache::from_legacy";
  const internal::StateReader reader(kFunction, state, {"keys", "values"});
  const internal::MetaReader items(kFunction, meta, {"keep", "max_size", "offset", "idx", "group_size", "bits"});
  const KVQuantization quantization = items.quantization(4, 5);
  auto columns = reader.columns(0, 1, quantization);
  const internal::RingNumbers numbers{.offset = items.integer(2, 0, kAnyInt),
                                      .keep = items.integer(0, 0, kAnyInt),
                                      .max_size = items.integer(1, 1, kAnyInt),
                                      .idx = items.integer(3, 0, kAnyInt)};
  internal::check_ring(kFunction, width_of(columns), numbers);
  return from_columns(numbers.max_size, numbers.keep, quantization, std::move(columns), numbers.offset, numbers.idx);
}

std::unique_ptr<QuantizedRotatingKVCache> QuantizedRotatingKVCache::from_columns(
    int max_size, int keep, const KVQuantization& quantization, std::optional<internal::KVColumns> buffer, int offset,
    int idx) {
  auto cache = std::make_unique<QuantizedRotatingKVCache>(max_size, keep, quantization.group_size, quantization.bits);
  cache->adopt(std::move(buffer), offset, idx);
  return cache;
}

State::List QuantizedRotatingKVCache::with_numbers(State::List items) const {
  for (int number : {offset_, keep_, max_size_, idx_, group_size(), bits()}) items.push_back(State(number));
  return items;
}

State QuantizedRotatingKVCache::state() const { return with_numbers(keys_values_state(false)); }

State QuantizedRotatingKVCache::saved_state() const { return with_numbers(keys_values_state(true)); }

State QuantizedRotatingKVCache::legacy_state() const { return keys_values_state(true); }

Meta QuantizedRotatingKVCache::legacy_meta() const {
  Meta::List items;
  for (int number : {keep_, max_size_, offset_, idx_, group_size(), bits()}) {
    items.push_back(Meta(std::to_string(number)));
  }
  return items;
}

std::unique_ptr<LayerCache> QuantizedRotatingKVCache::fork() const {
  return std::make_unique<QuantizedRotatingKVCache>(*this);
}

std::unique_ptr<LayerCache> QuantizedRotatingKVCache::to_dequantized() const {
  return RotatingKVCache::from_columns(max_size_, keep_, empty() ? std::nullopt : std::optional(buffer_->dequantized()),
                                       offset_, idx_);
}

std::unique_ptr<LayerCache> QuantizedRotatingKVCache::merge(const std::vector<const LayerCache*>& caches) const {
  return BatchQuantizedRotatingKVCache::merge_rows(caches);
}

void QuantizedRotatingKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<QuantizedRotatingKVCache&>(earlier));
}

}  // namespace reprise
