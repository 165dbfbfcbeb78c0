// The growing cache: keeps every row, grows in steps of 256 columns. One sequence, or rows in step.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/growing_cache.h"

namespace reprise {

class KVCache final : public internal::GrowingCache {
 public:
  static constexpr const char* kClassName = "KVCache";

  KVCache() : GrowingCache(std::nullopt) {}

  // `state` = [keys, values, offset], keys and values null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<KVCache> from_state(const State& state);
  // `state` = [keys, values]; the offset is the number of columns; no meta.
  static std::unique_ptr<KVCache> from_legacy(const State& state, const Meta& meta);

  std::string class_name() const override { return kClassName; }
  int size() const override { return offset_; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  bool has_quantized_counterpart() const override { return true; }
  // QuantizedKVCache with the same offset and capacity.
  std::unique_ptr<LayerCache> to_quantized(int group_size = 64, int bits = 4) const override;
  // BatchKVCache.
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override;

  // The whole buffer and its valid columns, for the classes that are made from this one.
  const std::optional<internal::KVColumns>& buffer() const { return buffer_; }
  // Requires: offset ≤ the buffer's columns, 0 without one.
  static std::unique_ptr<KVCache> from_columns(std::optional<internal::KVColumns> buffer, int offset);

 protected:
  void restore(LayerCache&& earlier) override;
};

}  // namespace reprise
