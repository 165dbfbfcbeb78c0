// The growing cache of several sequences: right-justified rows, shorter ones after padding. Real tokens of row b lie in
// columns left_padding[b] … idx - 1, and its position is idx - left_padding[b].
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/batch_growing_cache.h"

namespace reprise {

class BatchKVCache final : public internal::BatchGrowingCache {
 public:
  static constexpr const char* kClassName = "BatchKVCache";

  // One row for each number: the columns before its first real token in the first update.
  // Throws: invalid_argument for negative numbers.
  explicit BatchKVCache(std::vector<int> left_padding);

  // `state` = [keys, values, offset, left_padding, idx], keys and values null when empty. Nothing is pending.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<BatchKVCache> from_state(const State& state);
  // `state` = [keys, values, offset, left_padding]; idx is the number of columns; no meta.
  static std::unique_ptr<BatchKVCache> from_legacy(const State& state, const Meta& meta);
  // Rows of KVCaches, each of one row; empty ones have no tokens. Throws: invalid_argument for another class, several
  // rows or shapes that differ.
  static std::unique_ptr<BatchKVCache> merge_rows(const std::vector<const LayerCache*>& caches);

  std::string class_name() const override { return kClassName; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override { return {}; }
  std::unique_ptr<LayerCache> fork() const override;
  bool has_quantized_counterpart() const override { return true; }
  // BatchQuantizedKVCache with the same rows and capacity.
  std::unique_ptr<LayerCache> to_quantized(int group_size = 64, int bits = 4) const override;

  const std::optional<internal::KVColumns>& buffer() const { return buffer_; }
  // Requires: dense columns of left_padding.size() rows, idx ≤ their number, 0 without them. `right_padding`: empty, or
  // what finalize is to do.
  static std::unique_ptr<BatchKVCache> from_columns(std::optional<internal::KVColumns> buffer,
                                                    std::vector<int> left_padding, int idx,
                                                    std::vector<int> right_padding = {});

 protected:
  void restore(LayerCache&& earlier) override;
  std::unique_ptr<LayerCache> single_cache(std::optional<internal::KVColumns> columns) const override;
};

}  // namespace reprise
