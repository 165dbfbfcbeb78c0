#include "reprise/cache/batch_kv_cache.h"

#include "reprise/base/error.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/merge_sources.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

BatchKVCache::BatchKVCache(std::vector<int> left_padding)
    : BatchGrowingCache("BatchKVCache", std::move(left_padding), std::nullopt) {}

std::unique_ptr<BatchKVCache> BatchKVCache::from_state(const State& state) {
  const internal::StateReader reader("BatchKVCache::from_state", state,
                                     {"keys", "values", "offset", "left_padding", "idx"});
  Parts parts = read_parts(reader, std::nullopt, true);
  return from_columns(std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

std::unique_ptr<BatchKVCache> BatchKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("BatchKVCache::from_legacy", state, {"keys", "values", "offset", "left_padding"});
  const internal::MetaReader no_items("BatchKVCache::from_legacy", meta, {});
  Parts parts = read_parts(reader, std::nullopt, false);
  return from_columns(std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

std::unique_ptr<BatchKVCache> BatchKVCache::from_columns(std::optional<internal::KVColumns> buffer,
                                                         std::vector<int> left_padding, int idx,
                                                         std::vector<int> right_padding) {
  auto cache = std::make_unique<BatchKVCache>(std::vector<int>{});
  cache->assign({std::move(buffer), std::move(left_padding), idx});
  cache->right_padding_ = std::move(right_padding);
  return cache;
}

std::unique_ptr<BatchKVCache> BatchKVCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  std::vector<Source> sources;
  for (const KVCache* cache : internal::merge_sources<KVCache>("BatchKVCache::merge_rows", caches)) {
    sources.push_back({cache->buffer(), cache->length()});
  }
  Parts parts = merged_parts("BatchKVCache::merge_rows", sources);
  return from_columns(std::move(parts.buffer), std::move(parts.left_padding), parts.idx);
}

State BatchKVCache::state() const {
  State::List items = rows_state(false);
  items.push_back(State(idx_));
  return items;
}

State BatchKVCache::saved_state() const {
  State::List items = rows_state(true);
  items.push_back(State(idx_));
  return items;
}

State BatchKVCache::legacy_state() const { return rows_state(true); }

std::unique_ptr<LayerCache> BatchKVCache::fork() const { return std::make_unique<BatchKVCache>(*this); }

std::unique_ptr<LayerCache> BatchKVCache::to_quantized(int group_size, int bits) const {
  const KVQuantization quantization{group_size, bits};
  internal::check_quantization("BatchKVCache::to_quantized", quantization);
  auto buffer = empty() ? std::nullopt : std::optional(buffer_->quantized("BatchKVCache::to_quantized", quantization));
  return BatchQuantizedKVCache::from_columns(quantization, std::move(buffer), left_padding_, idx_, right_padding_);
}

void BatchKVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<BatchKVCache&>(earlier)); }

std::unique_ptr<LayerCache> BatchKVCache::single_cache(std::optional<internal::KVColumns> columns) const {
  const int length = columns ? columns->width() : 0;
  return KVCache::from_columns(std::move(columns), length);
}

}  // namespace reprise
