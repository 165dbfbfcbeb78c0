#include "reprise/cache/batch_quantized_kv_cache.h"

#include "reprise/base/error.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/merge_sources.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

BatchQuantizedKVCache::BatchQuantizedKVCache(std::vector<int> left_padding, int group_size, int bits)
    : BatchGrowingCache("BatchQuantizedKVCache", std::move(left_padding), KVQuantization{group_size, bits}) {
  internal::check_quantization("BatchQuantizedKVCache", *quantization_);
}

std::unique_ptr<BatchQuantizedKVCache> BatchQuantizedKVCache::from_state(const State& state) {
  const internal::StateReader reader("BatchQuantizedKVCache::from_state", state,
                                     {"keys", "values", "offset", "left_padding", "idx", "group_size", "bits"});
  const KVQuantization quantization = reader.quantization(5, 6);
  Parts parts = read_parts(reader, quantization, true);
  return from_columns(quantization, std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

std::unique_ptr<BatchQuantizedKVCache> BatchQuantizedKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("BatchQuantizedKVCache::from_legacy", state,
                                     {"keys", "values", "offset", "left_padding"});
  const internal::MetaReader numbers("BatchQuantizedKVCache::from_legacy", meta, {"group_size", "bits"});
  const KVQuantization quantization = numbers.quantization(0, 1);
  Parts parts = read_parts(reader, quantization, false);
  return from_columns(quantization, std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

std::unique_ptr<BatchQuantizedKVCache> BatchQuantizedKVCache::from_columns(const KVQuantization& quantization,
                                                                           std::optional<internal::KVColumns> buffer,
                                                                           std::vector<int> left_padding, int idx,
                                                                           std::vector<int> right_padding) {
  auto cache = std::make_unique<BatchQuantizedKVCache>(std::vector<int>{}, quantization.group_size, quantization.bits);
  cache->assign({std::move(buffer), std::move(left_padding), idx});
  cache->right_padding_ = std::move(right_padding);
  return cache;
}

std::unique_ptr<BatchQuantizedKVCache> BatchQuantizedKVCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  const std::string function = "BatchQuantizedKVCache::merge_rows";
  const auto singles = internal::merge_sources<QuantizedKVCache>(function, caches);
  const KVQuantization quantization = internal::common_quantization(function, singles);
  std::vector<Source> sources;
  for (const QuantizedKVCache* cache : singles) sources.push_back({cache->buffer(), cache->length()});
  Parts parts = merged_parts(function, sources);
  return from_columns(quantization, std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

State BatchQuantizedKVCache::full_state(bool saved) const {
  State::List items = rows_state(saved);
  for (const int number : {idx_, group_size(), bits()}) items.push_back(State(number));
  return items;
}

State BatchQuantizedKVCache::state() const { return full_state(false); }

State BatchQuantizedKVCache::saved_state() const { return full_state(true); }

State BatchQuantizedKVCache::legacy_state() const { return rows_state(true); }

Meta BatchQuantizedKVCache::legacy_meta() const {
  return Meta::List{Meta(std::to_string(group_size())), Meta(std::to_string(bits()))};
}

std::unique_ptr<LayerCache> BatchQuantizedKVCache::fork() const {
  return std::make_unique<BatchQuantizedKVCache>(*this);
}

std::unique_ptr<LayerCache> BatchQuantizedKVCache::to_dequantized() const {
  auto buffer = empty() ? std::nullopt : std::optional(buffer_->dequantized());
  return BatchKVCache::from_columns(std::move(buffer), left_padding_, idx_, right_padding_);
}

void BatchQuantizedKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<BatchQuantizedKVCache&>(earlier));
}

std::unique_ptr<LayerCache> BatchQuantizedKVCache::single_cache(std::optional<internal::KVColumns> columns) const {
  if (!columns) return std::make_unique<QuantizedKVCache>(group_size(), bits());
  const int length = columns->width();
  return QuantizedKVCache::from_columns(std::move(*columns), length);
}

}  // namespace reprise
