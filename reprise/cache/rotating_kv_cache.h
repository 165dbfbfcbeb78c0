// The sliding-window cache: the first `keep` rows and the most recent others, max_size of them. One sequence, or rows
// in step. Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/ring_cache.h"

namespace reprise {

class RotatingKVCache final : public internal::RingCache {
 public:
  static constexpr const char* kClassName = "RotatingKVCache";

  // Throws: invalid_argument unless max_size ≥ 1 and 0 ≤ keep < max_size.
  explicit RotatingKVCache(int max_size, int keep = 0);

  // `state` = [keys, values, offset, keep, max_size, idx], keys and values null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<RotatingKVCache> from_state(const State& state);
  // `state` = [keys, values]; meta = keep, max_size, offset, idx, or of the first generation keep, max_size, step,
  // offset, idx.
  static std::unique_ptr<RotatingKVCache> from_legacy(const State& state, const Meta& meta);

  std::string class_name() const override { return kClassName; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  bool has_quantized_counterpart() const override { return true; }
  // QuantizedRotatingKVCache with the same columns, offset and idx.
  std::unique_ptr<LayerCache> to_quantized(int group_size = 64, int bits = 4) const override;
  // BatchRotatingKVCache.
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override;

  // Requires: numbers that internal::check_ring accepts for this buffer.
  static std::unique_ptr<RotatingKVCache> from_columns(int max_size, int keep,
                                                       std::optional<internal::KVColumns> buffer, int offset, int idx);

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  State::List with_numbers(State::List items) const;
};

}  // namespace reprise
