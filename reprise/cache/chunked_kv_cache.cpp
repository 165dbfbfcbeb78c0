#include "reprise/cache/chunked_kv_cache.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "reprise/base/error.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

}  // namespace

ChunkedKVCache::ChunkedKVCache(int chunk_size) : GrowingCache(std::nullopt), chunk_size_(chunk_size) {
  if (chunk_size >= 1) return;
  throw Error(ErrorCode::invalid_argument,
              "[ChunkedKVCache] chunk_size must be at least 1, but got " + std::to_string(chunk_size));
}

std::unique_ptr<ChunkedKVCache> ChunkedKVCache::from_state(const State& state) {
  const internal::StateReader reader("ChunkedKVCache::from_state", state,
                                     {"keys", "values", "offset", "chunk_size", "start_position"});
  auto cache = std::make_unique<ChunkedKVCache>(reader.integer(3, 1, kMaxInt));
  cache->buffer_ = reader.columns(0, 1);
  const int width = cache->buffer_ ? cache->buffer_->width() : 0;
  cache->start_ = reader.integer(4, 0, cache->buffer_ ? kMaxInt - width : 0);
  cache->offset_ = reader.integer(2, cache->start_, cache->start_ + width);
  return cache;
}

std::unique_ptr<ChunkedKVCache> ChunkedKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("ChunkedKVCache::from_legacy", state, {"keys", "values"});
  const internal::MetaReader numbers("ChunkedKVCache::from_legacy", meta, {"chunk_size", "start_position"});
  auto cache = std::make_unique<ChunkedKVCache>(numbers.integer(0, 1, kMaxInt));
  cache->buffer_ = reader.columns(0, 1);
  const int width = cache->buffer_ ? cache->buffer_->width() : 0;
  cache->start_ = numbers.integer(1, 0, cache->buffer_ ? kMaxInt - width : 0);
  cache->offset_ = cache->start_ + width;
  return cache;
}

void ChunkedKVCache::maybe_trim_front() {
  const int stored = length();
  if (stored <= chunk_size_) return;
  const int dropped = stored - chunk_size_;
  buffer_ = buffer_->slice(dropped, stored).contiguous();
  start_ += dropped;
}

int ChunkedKVCache::max_trim() const { return max_trim(start_, offset_, chunk_size_, offset_); }

int ChunkedKVCache::max_trim(int start, int offset, int chunk_size, int all) {
  if (start == 0) return all;
  const std::int64_t first_whole_chunk = (std::int64_t{start} + chunk_size - 1) / chunk_size * chunk_size;
  return static_cast<int>(std::max(std::int64_t{0}, offset - first_whole_chunk));
}

State ChunkedKVCache::with_numbers(State::List items) const {
  for (int number : {offset_, chunk_size_, start_}) items.push_back(State(number));
  return items;
}

State ChunkedKVCache::state() const { return with_numbers(keys_values_state(false)); }

State ChunkedKVCache::saved_state() const { return with_numbers(keys_values_state(true)); }

State ChunkedKVCache::legacy_state() const { return keys_values_state(true); }

Meta ChunkedKVCache::legacy_meta() const {
  return Meta::List{Meta(std::to_string(chunk_size_)), Meta(std::to_string(start_))};
}

std::unique_ptr<LayerCache> ChunkedKVCache::fork() const { return std::make_unique<ChunkedKVCache>(*this); }

std::unique_ptr<LayerCache> ChunkedKVCache::merge(const std::vector<const LayerCache*>& caches) const {
  return BatchChunkedKVCache::merge_rows(caches);
}

std::unique_ptr<ChunkedKVCache> ChunkedKVCache::from_columns(int chunk_size,
                                                             std::optional<internal::KVColumns> columns) {
  auto cache = std::make_unique<ChunkedKVCache>(chunk_size);
  cache->offset_ = columns ? columns->width() : 0;
  cache->buffer_ = std::move(columns);
  return cache;
}

void ChunkedKVCache::begin_at(int start) {
  offset_ += start - start_;
  start_ = start;
}

void ChunkedKVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<ChunkedKVCache&>(earlier)); }

}  // namespace reprise
