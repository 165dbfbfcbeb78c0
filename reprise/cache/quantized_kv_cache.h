// The growing cache over quantised rows: each row is quantised once, when it comes, by MLX's affine quantisation along
// the head. Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/growing_cache.h"

namespace reprise {

class QuantizedKVCache final : public internal::GrowingCache {
 public:
  static constexpr const char* kClassName = "QuantizedKVCache";

  // group_size 32, 64 or 128, and it must divide D and Dv of the first update; bits 2, 3, 4, 5, 6 or 8.
  // Throws: invalid_argument.
  explicit QuantizedKVCache(int group_size = 64, int bits = 8);

  // `state` = [keys triple, values triple, offset, group_size, bits], triples null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<QuantizedKVCache> from_state(const State& state);
  // `state` = the two triples; meta = offset, group_size, bits.
  static std::unique_ptr<QuantizedKVCache> from_legacy(const State& state, const Meta& meta);

  int group_size() const { return quantization_->group_size; }
  int bits() const { return quantization_->bits; }

  std::string class_name() const override { return kClassName; }
  int size() const override { return 0; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  // KVCache with the same offset and capacity.
  std::unique_ptr<LayerCache> to_dequantized() const override;
  // BatchQuantizedKVCache.
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override;

  const std::optional<internal::KVColumns>& buffer() const { return buffer_; }
  // Requires: quantised columns, offset ≤ their number.
  static std::unique_ptr<QuantizedKVCache> from_columns(internal::KVColumns buffer, int offset);

 protected:
  void restore(LayerCache&& earlier) override;
};

}  // namespace reprise
