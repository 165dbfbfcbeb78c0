#include "reprise/cache/rotating_kv_cache.h"

#include <limits>

#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kAnyInt = std::numeric_limits<int>::max();

std::optional<int> width_of(const std::optional<internal::KVColumns>& buffer) {
  return buffer ? std::optional(buffer->width()) : std::nullopt;
}

// The first generation of the older layout has a fifth number, its growth step.
bool has_step(const Meta& meta) { return meta.as_list() && meta.as_list()->size() == 5; }

internal::RingNumbers legacy_numbers(const char* function, const Meta& meta) {
  const bool step = has_step(meta);
  const internal::MetaReader reader =
      step ? internal::MetaReader(function, meta, {"keep", "max_size", "step", "offset", "idx"})
           : internal::MetaReader(function, meta, {"keep", "max_size", "offset", "idx"});
  const std::size_t offset_item = step ? 3 : 2;
  internal::RingNumbers numbers;
  numbers.keep = reader.integer(0, 0, kAnyInt);
  numbers.max_size = reader.integer(1, 1, kAnyInt);
  numbers.offset = reader.integer(offset_item, 0, kAnyInt);
  numbers.idx = reader.integer(offset_item + 1, 0, kAnyInt);
  return numbers;
}

}  // namespace

RotatingKVCache::RotatingKVCache(int max_size, int keep) : RingCache("RotatingKVCache", max_size, keep, std::nullopt) {}

std::unique_ptr<RotatingKVCache> RotatingKVCache::from_state(const State& state) {
  constexpr const char* kFunction = "RotatingKVCache::from_state";
  const internal::StateReader reader(kFunction, state, {"keys", "values", "offset", "keep", "max_size", "idx"});
  auto buffer = reader.columns(0, 1);
  const internal::RingNumbers numbers{.offset = reader.integer(2, 0, kAnyInt),
                                      .keep = reader.integer(3, 0, kAnyInt),
                                      .max_size = reader.integer(4, 1, kAnyInt),
                                      .idx = reader.integer(5, 0, kAnyInt)};
  internal::check_ring(kFunction, width_of(buffer), numbers);
  return from_columns(numbers.max_size, numbers.keep, std::move(buffer), numbers.offset, numbers.idx);
}

std::unique_ptr<RotatingKVCache> RotatingKVCache::from_legacy(const State& state, const Meta& meta) {
  constexpr const char* kFunction = "RotatingKVCache::from_legacy";
  const internal::StateReader reader(kFunction, state, {"keys", "values"});
  const internal::RingNumbers numbers = legacy_numbers(kFunction, meta);
  auto buffer = reader.columns(0, 1);
  internal::check_ring(kFunction, width_of(buffer), numbers);
  return from_columns(numbers.max_size, numbers.keep, std::move(buffer), numbers.offset, numbers.idx);
}

std::unique_ptr<RotatingKVCache> RotatingKVCache::from_columns(int max_size, int keep,
                                                               std::optional<internal::KVColumns> buffer, int offset,
                                                               int idx) {
  auto cache = std::make_unique<RotatingKVCache>(max_size, keep);
  cache->adopt(std::move(buffer), offset, idx);
  return cache;
}

State::List RotatingKVCache::with_numbers(State::List items) const {
  for (int number : {offset_, keep_, max_size_, idx_}) items.push_back(State(number));
  return items;
}

State RotatingKVCache::state() const { return with_numbers(keys_values_state(false)); }

State RotatingKVCache::saved_state() const { return with_numbers(keys_values_state(true)); }

State RotatingKVCache::legacy_state() const { return keys_values_state(true); }

Meta RotatingKVCache::legacy_meta() const {
  Meta::List items;
  for (int number : {keep_, max_size_, offset_, idx_}) items.push_back(Meta(std::to_string(number)));
  return items;
}

std::unique_ptr<LayerCache> RotatingKVCache::fork() const { return std::make_unique<RotatingKVCache>(*this); }

std::unique_ptr<LayerCache> RotatingKVCache::to_quantized(int group_size, int bits) const {
  const KVQuantization quantization{group_size, bits};
  internal::check_quantization("RotatingKVCache::to_quantized", quantization);
  std::optional<internal::KVColumns> columns;
  if (buffer_) columns = buffer_->quantized("RotatingKVCache::to_quantized", quantization);
  return QuantizedRotatingKVCache::from_columns(max_size_, keep_, quantization, std::move(columns), offset_, idx_);
}

std::unique_ptr<LayerCache> RotatingKVCache::merge(const std::vector<const LayerCache*>& caches) const {
  return BatchRotatingKVCache::merge_rows(caches);
}

void RotatingKVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<RotatingKVCache&>(earlier)); }

}  // namespace reprise
