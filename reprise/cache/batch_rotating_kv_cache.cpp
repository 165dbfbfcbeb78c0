#include "reprise/cache/batch_rotating_kv_cache.h"

#include <limits>

#include "reprise/base/error.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/merge_sources.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kAnyInt = std::numeric_limits<int>::max();

}  // namespace

BatchRotatingKVCache::BatchRotatingKVCache(int max_size, std::vector<int> left_padding, int keep)
    : BatchRingCache("BatchRotatingKVCache", max_size, std::move(left_padding), keep, std::nullopt) {}

std::unique_ptr<BatchRotatingKVCache> BatchRotatingKVCache::from_state(const State& state) {
  const internal::StateReader reader(
      "BatchRotatingKVCache::from_state", state,
      {"keys", "values", "offset", "left_padding", "max_size", "columns_written", "idx", "rotated"});
  const Numbers numbers{.max_size = reader.integer(4, 1, kAnyInt),
                        .columns_written = reader.integer(5, 0, kAnyInt),
                        .idx = reader.integer(6, 0, kAnyInt),
                        .rotated = reader.boolean(7)};
  auto cache = std::make_unique<BatchRotatingKVCache>(numbers.max_size, std::vector<int>{});
  cache->load(reader, numbers);
  return cache;
}

std::unique_ptr<BatchRotatingKVCache> BatchRotatingKVCache::from_legacy(const State& state, const Meta& meta) {
  constexpr const char* kFunction = "BatchRotatingKVCache::from_legacy";
  const internal::StateReader reader(kFunction, state, {"keys", "values", "offset", "left_padding"});
  const internal::MetaReader meta_reader(kFunction, meta, {"max_size", "columns_written", "idx", "rotated"});
  const Numbers numbers{.max_size = meta_reader.integer(0, 1, kAnyInt),
                        .columns_written = meta_reader.integer(1, 0, kAnyInt),
                        .idx = meta_reader.integer(2, 0, kAnyInt),
                        .rotated = meta_reader.boolean(3)};
  auto cache = std::make_unique<BatchRotatingKVCache>(numbers.max_size, std::vector<int>{});
  cache->load(reader, numbers);
  return cache;
}

std::unique_ptr<LayerCache> BatchRotatingKVCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  const std::string function = "BatchRotatingKVCache::merge_rows";
  const auto sources = internal::merge_sources<RotatingKVCache>(function, caches);
  if (sources.empty()) {
    throw Error(ErrorCode::invalid_argument, "[" + function + "] at least one cache is needed, but got none");
  }
  auto batch = std::make_unique<BatchRotatingKVCache>(sources.front()->max_size(), std::vector<int>(sources.size(), 0),
                                                      sources.front()->keep());
  batch->merge_from(function, {sources.begin(), sources.end()});
  return batch;
}

std::unique_ptr<LayerCache> BatchRotatingKVCache::fork() const { return std::make_unique<BatchRotatingKVCache>(*this); }

std::unique_ptr<LayerCache> BatchRotatingKVCache::to_quantized(int group_size, int bits) const {
  auto quantized =
      std::make_unique<BatchQuantizedRotatingKVCache>(max_size(), std::vector<int>(), keep(), group_size, bits);
  quantized->copy_from(
      *this, buffer() ? std::optional(buffer()->quantized("BatchRotatingKVCache::to_quantized", {group_size, bits}))
                      : std::nullopt);
  return quantized;
}

void BatchRotatingKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<BatchRotatingKVCache&>(earlier));
}

std::unique_ptr<LayerCache> BatchRotatingKVCache::single_cache(std::optional<internal::KVColumns> columns,
                                                               int offset) const {
  const int idx = columns ? columns->width() : 0;
  return RotatingKVCache::from_columns(max_size(), keep(), std::move(columns), offset, idx);
}

}  // namespace reprise
