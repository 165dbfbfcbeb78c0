#include "reprise/cache/batch_chunked_kv_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/merge_sources.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/cache/state_reader.h"

namespace reprise {

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

[[noreturn]] void refuse(const std::string& what, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "[BatchChunkedKVCache" + what + ", but got " + got);
}

}  // namespace

BatchChunkedKVCache::BatchChunkedKVCache(int chunk_size, std::vector<int> left_padding)
    : BatchGrowingCache("BatchChunkedKVCache", std::move(left_padding), std::nullopt),
      chunk_size_(chunk_size),
      starts_(left_padding_.size(), 0) {
  if (chunk_size < 1) refuse("] chunk_size must be at least 1", std::to_string(chunk_size));
}

std::unique_ptr<BatchChunkedKVCache> BatchChunkedKVCache::from_parts(int chunk_size, Parts parts,
                                                                     std::vector<int> starts) {
  auto cache = std::make_unique<BatchChunkedKVCache>(chunk_size, std::vector<int>{});
  cache->assign(std::move(parts));
  cache->starts_ = std::move(starts);
  return cache;
}

std::unique_ptr<BatchChunkedKVCache> BatchChunkedKVCache::from_state(const State& state) {
  const internal::StateReader reader("BatchChunkedKVCache::from_state", state,
                                     {"keys", "values", "offset", "left_padding", "idx", "chunk_size"});
  const int chunk_size = reader.integer(5, 1, kMaxInt);
  std::vector<int> starts;
  Parts parts = read_parts(reader, std::nullopt, true, &starts);
  return from_parts(chunk_size, std::move(parts), std::move(starts));
}

std::unique_ptr<BatchChunkedKVCache> BatchChunkedKVCache::from_legacy(const State& state, const Meta& meta) {
  const internal::StateReader reader("BatchChunkedKVCache::from_legacy", state,
                                     {"keys", "values", "offset", "left_padding"});
  const internal::MetaReader numbers("BatchChunkedKVCache::from_legacy", meta, {"chunk_size"});
  const int chunk_size = numbers.integer(0, 1, kMaxInt);
  std::vector<int> starts;
  Parts parts = read_parts(reader, std::nullopt, false, &starts);
  return from_parts(chunk_size, std::move(parts), std::move(starts));
}

std::unique_ptr<BatchChunkedKVCache> BatchChunkedKVCache::merge_rows(const std::vector<const LayerCache*>& caches) {
  const std::string function = "BatchChunkedKVCache::merge_rows";
  const auto singles = internal::merge_sources<ChunkedKVCache>(function, caches);
  if (singles.empty()) refuse("::merge_rows] at least one cache is needed", "none");
  std::vector<Source> sources;
  std::vector<int> starts;
  for (const ChunkedKVCache* cache : singles) {
    if (cache->chunk_size() != singles.front()->chunk_size()) {
      refuse("::merge_rows] caches must agree in chunk_size",
             std::to_string(singles.front()->chunk_size()) + " and " + std::to_string(cache->chunk_size()));
    }
    sources.push_back({cache->buffer(), cache->length()});
    starts.push_back(cache->start_position());
  }
  Parts parts = merged_parts(function, sources);
  return from_parts(singles.front()->chunk_size(), std::move(parts), std::move(starts));
}

void BatchChunkedKVCache::maybe_trim_front() {
  if (idx_ <= chunk_size_ || is_in_padded_prompt()) return;
  const int dropped = idx_ - chunk_size_;
  buffer_ = buffer_->slice(dropped, idx_).contiguous();
  idx_ = chunk_size_;
  for (std::size_t row = 0; row < starts_.size(); ++row) {
    const int padding = std::min(left_padding_[row], dropped);
    left_padding_[row] -= padding;
    starts_[row] += dropped - padding;
  }
}

std::vector<int> BatchChunkedKVCache::positions() const {
  std::vector<int> result = BatchGrowingCache::positions();
  for (std::size_t row = 0; row < starts_.size(); ++row) result[row] += starts_[row];
  return result;
}

int BatchChunkedKVCache::max_trim() const {
  int most = idx_;
  const std::vector<int> all = positions();
  for (std::size_t row = 0; row < starts_.size(); ++row) {
    most = std::min(most, ChunkedKVCache::max_trim(starts_[row], std::max(all[row], 0), chunk_size_, idx_));
  }
  return most;
}

State BatchChunkedKVCache::state() const {
  State::List items = rows_state(false);
  for (const int number : {idx_, chunk_size_}) items.push_back(State(number));
  return items;
}

State BatchChunkedKVCache::saved_state() const {
  State::List items = rows_state(true);
  for (const int number : {idx_, chunk_size_}) items.push_back(State(number));
  return items;
}

State BatchChunkedKVCache::legacy_state() const { return rows_state(true); }

Meta BatchChunkedKVCache::legacy_meta() const { return Meta::List{Meta(std::to_string(chunk_size_))}; }

std::unique_ptr<LayerCache> BatchChunkedKVCache::fork() const { return std::make_unique<BatchChunkedKVCache>(*this); }

void BatchChunkedKVCache::filter(const std::vector<int>& rows) {
  BatchGrowingCache::filter(rows);
  starts_ = internal::chosen_rows(starts_, rows);
}

void BatchChunkedKVCache::extend(const LayerCache& other) {
  const auto* added = dynamic_cast<const BatchChunkedKVCache*>(&other);
  if (added != nullptr && added->chunk_size_ != chunk_size_) {
    refuse("::extend] batches must agree in chunk_size",
           std::to_string(chunk_size_) + " and " + std::to_string(added->chunk_size_));
  }
  std::vector<int> starts = starts_;
  if (added != nullptr) starts.insert(starts.end(), added->starts_.begin(), added->starts_.end());
  BatchGrowingCache::extend(other);
  starts_ = std::move(starts);
}

std::unique_ptr<LayerCache> BatchChunkedKVCache::extract(int row) const {
  auto cache = BatchGrowingCache::extract(row);
  dynamic_cast<ChunkedKVCache&>(*cache).begin_at(starts_[static_cast<std::size_t>(row)]);
  return cache;
}

void BatchChunkedKVCache::restore(LayerCache&& earlier) {
  *this = std::move(dynamic_cast<BatchChunkedKVCache&>(earlier));
}

std::unique_ptr<LayerCache> BatchChunkedKVCache::single_cache(std::optional<internal::KVColumns> columns) const {
  return ChunkedKVCache::from_columns(chunk_size_, std::move(columns));
}

}  // namespace reprise
