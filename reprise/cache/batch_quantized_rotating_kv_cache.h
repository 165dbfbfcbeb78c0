// BatchRotatingKVCache over quantised rows: each row is quantised once, when it comes; padding dequantises to 0.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/batch_ring_cache.h"

namespace reprise {

class BatchQuantizedRotatingKVCache final : public internal::BatchRingCache {
 public:
  static constexpr const char* kClassName = "BatchQuantizedRotatingKVCache";

  // One row for each number of `left_padding`. Throws: invalid_argument unless max_size ≥ 1, 0 ≤ keep < max_size, no
  // padding is negative and MLX knows the group size and bits.
  BatchQuantizedRotatingKVCache(int max_size, std::vector<int> left_padding, int keep = 0, int group_size = 64,
                                int bits = 8);

  // `state` = [keys triple, values triple, offset, left_padding, max_size, columns written, idx, rotated, keep,
  // group_size, bits], triples null when empty. Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<BatchQuantizedRotatingKVCache> from_state(const State& state);
  // `state` = [keys triple, values triple, offset, left_padding]; meta = the other items, rotated as True or False.
  static std::unique_ptr<BatchQuantizedRotatingKVCache> from_legacy(const State& state, const Meta& meta);
  // A batch of QuantizedRotatingKVCaches with one row each. Throws: invalid_argument for what else they are, or for
  // another max_size, keep, group size, bits, shape or dtype than the first's.
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);

  int group_size() const { return quantization_->group_size; }
  int bits() const { return quantization_->bits; }

  std::string class_name() const override { return kClassName; }
  std::unique_ptr<LayerCache> fork() const override;
  // BatchRotatingKVCache with the same rows.
  std::unique_ptr<LayerCache> to_dequantized() const override;

 protected:
  void restore(LayerCache&& earlier) override;
  std::unique_ptr<LayerCache> single_cache(std::optional<internal::KVColumns> columns, int offset) const override;

 private:
  friend class BatchRotatingKVCache;
};

}  // namespace reprise
