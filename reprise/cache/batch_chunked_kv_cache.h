// The chunked cache of several sequences: right-justified rows as in a BatchKVCache, of which the columns that no later
// query of any row can see are dropped at the front. Each row has its own chunk borders: its first stored token is at
// position starts()[b], in column left_padding()[b]. mlx-lm has no such class.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/batch_growing_cache.h"
#include "reprise/cache/chunked_kv_cache.h"

namespace reprise {

class BatchChunkedKVCache final : public internal::BatchGrowingCache, public FrontTrimmedCache {
 public:
  static constexpr const char* kClassName = "BatchChunkedKVCache";

  // One row for each number: the columns before its first real token in the first update.
  // Throws: invalid_argument for chunk_size < 1 or negative numbers.
  BatchChunkedKVCache(int chunk_size, std::vector<int> left_padding);

  // `state` = [keys, values, offset, left_padding, idx, chunk_size], keys and values null when empty. Nothing is
  // pending. Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<BatchChunkedKVCache> from_state(const State& state);
  // `state` = [keys, values, offset, left_padding]; meta = chunk_size; idx is the number of columns.
  static std::unique_ptr<BatchChunkedKVCache> from_legacy(const State& state, const Meta& meta);
  // Rows of ChunkedKVCaches of one chunk size; else as BatchKVCache::merge_rows.
  static std::unique_ptr<BatchChunkedKVCache> merge_rows(const std::vector<const LayerCache*>& caches);

  // Keeps the last chunk_size columns when there are more; all of them between prepare and finalize of a right-padded
  // prompt, whose filler would push out what shorter rows still need.
  void maybe_trim_front() override;

  int chunk_size() const override { return chunk_size_; }
  // Position of each row's first stored token.
  const std::vector<int>& starts() const { return starts_; }

  std::string class_name() const override { return kClassName; }
  std::vector<int> positions() const override;
  // As far as every row's next token finds its chunk whole.
  int max_trim() const override;
  bool keeps_all_rows() const override { return false; }
  bool serves_chunks(int chunk_size) const override { return chunk_size == chunk_size_; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;

  void filter(const std::vector<int>& rows) override;
  void extend(const LayerCache& other) override;
  std::unique_ptr<LayerCache> extract(int row) const override;

 protected:
  void restore(LayerCache&& earlier) override;
  std::unique_ptr<LayerCache> single_cache(std::optional<internal::KVColumns> columns) const override;

 private:
  static std::unique_ptr<BatchChunkedKVCache> from_parts(int chunk_size, Parts parts, std::vector<int> starts);

  int chunk_size_;
  std::vector<int> starts_;  // one for each row, not negative
};

}  // namespace reprise
