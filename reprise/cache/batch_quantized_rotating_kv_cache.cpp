#include "reprise/cache/batch_quantized_rotating_kv_cache.h"

#include <limits>

#include "reprise/base/error.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/merge_sources.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kAnyInt = std::numeric_limits<int>::max();

std::unique_ptr<BatchQuantizedRotatingKVCache> without_rows(int max_size, const KVQuantization& quantization) {
  return std::make_unique<BatchQuantizedRotatingKVCache>(max_size, std::vector<int>{}, 0, quantization.group_size,
                                                         quantization.bits);
}

}  // namespace

BatchQuantizedRotatingKVCache::BatchQuantizedRotatingKVCache(int max_size, std::vector<int> left_padding, int keep,
                                                             int group_size, int bits)
    : BatchRingCache("BatchQuantizedRotatingKVCache", max_size, std::move(left_padding), keep,
                     KVQuantization{group_size, bits}) {
  internal::check_quantization("BatchQuantizedRotatingKVCache", *quantization_);
}

std::unique_ptr<BatchQuantizedRotatingKVCache> BatchQuantizedRotatingKVCache::from_state(const State& state) {
  constexpr const char* kFunction = "BatchQuantizedRotatingKVCache::from_state";
  const internal::StateReader reader(kFunction, state,
                                     {"keys", "values", "offset", "left_padding", "max_size", "columns_written", "idx",
                                      "rotated", "keep", "group_size", "bits"});
  const Numbers numbers{.max_size = reader.integer(4, 1, kAnyInt),
                        .columns_written = reader.integer(5, 0, kAnyInt),
                        .idx = reader.integer(6, 0, kAnyInt),
                        .rotated = reader.boolean(7)};
  auto cache = without_rows(numbers.max_size, reader.quantization(9, 10));
  cache->load(reader, numbers);
  cache->set_keep(kFunction, reader.integer(8, 0, numbers.max_size - 1));
  return cache;
}

std::unique_ptr<BatchQuantizedRotatingKVCache> BatchQuantizedRotatingKVCache::from_legacy(const State& state,
                                                                                          const Meta& meta) {
  constexpr const char* kFunction = "BatchQuantizedRotatingKVCache::from_legacy";
  const internal::StateReader reader(kFunction, state, {"keys", "values", "offset", "left_padding"});
  const internal::MetaReader meta_reader(
      kFunction, meta, {"max_size", "columns_written", "idx", "rotated", "keep", "group_size", "bits"});
  const Numbers numbers{.max_size = meta_reader.integer(0, 1, kAnyInt),
                        .columns_written = meta_reader.integer(1, 0, kAnyInt),
                        .idx = meta_reader.integer(2, 0, kAnyInt),
                        .rotated = meta_reader.boolean(3)};
  auto cache = without_rows(numbers.max_size, meta_reader.quantization(5, 6));
  cache->load(reader, numbers);
  cache->set_keep(kFunction, meta_reader.integer(4, 0, numbers.max_size - 1));
  return cache;
}

std::unique_ptr<LayerCache> BatchQuantizedRotatingKVCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  const std::string function = "BatchQuantizedRotatingKVCache::merge_rows";
  const auto sources = internal::merge_sources<QuantizedRotatingKVCache>(function, caches);
  const KVQuantization quantization = internal::common_quantization(function, sources);
  auto batch = std::make_unique<BatchQuantizedRotatingKVCache>(
      sources.front()->max_size(), std::vector<int>(sources.size(), 0), sources.front()->keep(),
      quantization.group_size, quantization.bits);
  batch->merge_from(function, {sources.begin(), sources.end()});
  return batch;
}

std::unique_ptr<LayerCache> BatchQuantizedRotatingKVCache::fork() const {
  return std::make_unique<BatchQuantizedRotatingKVCache>(*this);
}

std::unique_ptr<LayerCache> BatchQuantizedRotatingKVCache::to_dequantized() const {
  auto dense = std::make_unique<BatchRotatingKVCache>(max_size(), std::vector<int>{}, keep());
  dense->copy_from(*this, buffer() ? std::optional(buffer()->dequantized()) : std::nullopt);
  return dense;
}

void BatchQuantizedRotatingKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<BatchQuantizedRotatingKVCache&>(earlier));
}

std::unique_ptr<LayerCache> BatchQuantizedRotatingKVCache::single_cache(std::optional<internal::KVColumns> columns,
                                                                        int offset) const {
  const int idx = columns ? columns->width() : 0;
  return QuantizedRotatingKVCache::from_columns(max_size(), keep(), *quantization_, std::move(columns), offset, idx);
}

}  // namespace reprise
