// The sliding-window cache of several rows: each row sees its first `keep` tokens and its most recent others, max_size
// of them, as its RotatingKVCache alone would. Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/batch_ring_cache.h"

namespace reprise {

class BatchRotatingKVCache final : public internal::BatchRingCache {
 public:
  static constexpr const char* kClassName = "BatchRotatingKVCache";

  // One row for each number of `left_padding`. Throws: invalid_argument unless max_size ≥ 1, 0 ≤ keep < max_size and no
  // padding is negative.
  BatchRotatingKVCache(int max_size, std::vector<int> left_padding, int keep = 0);

  // `state` = [keys, values, offset, left_padding, max_size, columns written, idx, rotated], keys and values null when
  // empty; keep is 0 until set_extra_state says otherwise. Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<BatchRotatingKVCache> from_state(const State& state);
  // `state` = [keys, values, offset, left_padding]; meta = max_size, columns written, idx, rotated.
  static std::unique_ptr<BatchRotatingKVCache> from_legacy(const State& state, const Meta& meta);
  // A batch of RotatingKVCaches with one row each. Throws: invalid_argument for what else they are, or for another
  // max_size, keep, shape or dtype than the first's.
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);

  std::string class_name() const override { return kClassName; }
  std::unique_ptr<LayerCache> fork() const override;
  bool has_quantized_counterpart() const override { return true; }
  // BatchQuantizedRotatingKVCache with the same rows.
  std::unique_ptr<LayerCache> to_quantized(int group_size = 64, int bits = 4) const override;

 protected:
  void restore(LayerCache&& earlier) override;
  std::unique_ptr<LayerCache> single_cache(std::optional<internal::KVColumns> columns, int offset) const override;

 private:
  friend class BatchQuantizedRotatingKVCache;
};

}  // namespace reprise
