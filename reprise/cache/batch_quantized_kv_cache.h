// BatchKVCache over quantised rows: each row is quantised once, when it comes; padding is zeros. mlx-lm has no such
// class.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <vector>

#include "reprise/cache/batch_growing_cache.h"

namespace reprise {

class BatchQuantizedKVCache final : public internal::BatchGrowingCache {
 public:
  static constexpr const char* kClassName = "BatchQuantizedKVCache";

  // Padding as BatchKVCache, quantisation as QuantizedKVCache. Throws: invalid_argument.
  explicit BatchQuantizedKVCache(std::vector<int> left_padding, int group_size = 64, int bits = 8);

  // `state` = [keys triple, values triple, offset, left_padding, idx, group_size, bits], triples null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<BatchQuantizedKVCache> from_state(const State& state);
  // `state` = the triples, offset, left_padding; meta = group_size, bits.
  static std::unique_ptr<BatchQuantizedKVCache> from_legacy(const State& state, const Meta& meta);
  // Rows of QuantizedKVCaches of equal group size and bits; else as BatchKVCache::merge_rows.
  static std::unique_ptr<BatchQuantizedKVCache> merge_rows(const std::vector<const LayerCache*>& caches);

  int group_size() const { return quantization_->group_size; }
  int bits() const { return quantization_->bits; }

  std::string class_name() const override { return kClassName; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  // BatchKVCache with the same rows and capacity.
  std::unique_ptr<LayerCache> to_dequantized() const override;

  const std::optional<internal::KVColumns>& buffer() const { return buffer_; }
  // Requires: as BatchKVCache::from_columns, but columns of this quantisation.
  static std::unique_ptr<BatchQuantizedKVCache> from_columns(const KVQuantization& quantization,
                                                             std::optional<internal::KVColumns> buffer,
                                                             std::vector<int> left_padding, int idx,
                                                             std::vector<int> right_padding = {});

 protected:
  void restore(LayerCache&& earlier) override;
  std::unique_ptr<LayerCache> single_cache(std::optional<internal::KVColumns> columns) const override;

 private:
  State full_state(bool saved) const;
};

}  // namespace reprise
