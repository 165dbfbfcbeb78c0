// The sliding-window cache over quantised rows: each row is quantised once, when it comes; turning the ring moves
// packed columns. Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/ring_cache.h"

namespace reprise {

class QuantizedRotatingKVCache final : public internal::RingCache {
 public:
  static constexpr const char* kClassName = "QuantizedRotatingKVCache";

  // group_size 32, 64 or 128, and it must divide D and Dv of the first update; bits 2, 3, 4, 5, 6 or 8.
  // Throws: invalid_argument for those, and unless max_size ≥ 1 and 0 ≤ keep < max_size.
  explicit QuantizedRotatingKVCache(int max_size, int keep = 0, int group_size = 64, int bits = 8);

  // `state` = [keys triple, values triple, offset, keep, max_size, idx, group_size, bits], triples null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<QuantizedRotatingKVCache> from_state(const State& state);
  // `state` = the two triples; meta = keep, max_size, offset, idx, group_size, bits.
  static std::unique_ptr<QuantizedRotatingKVCache> from_legacy(const State& state, const Meta& meta);

  int group_size() const { return quantization_->group_size; }
  int bits() const { return quantization_->bits; }

  std::string class_name() const override { return kClassName; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  // RotatingKVCache with the same columns, offset and idx.
  std::unique_ptr<LayerCache> to_dequantized() const override;
  // BatchQuantizedRotatingKVCache.
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override;

  // Requires: numbers that internal::check_ring accepts for this buffer, which is quantised alike.
  static std::unique_ptr<QuantizedRotatingKVCache> from_columns(int max_size, int keep,
                                                                const KVQuantization& quantization,
                                                                std::optional<internal::KVColumns> buffer, int offset,
                                                                int idx);

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  State::List with_numbers(State::List items) const;
};

}  // namespace reprise
