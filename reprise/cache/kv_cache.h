// The growing cache: keeps every row, grows in steps of 256 columns. One sequence, or rows in step.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <optional>

#include "reprise/cache/layer_cache.h"

namespace reprise {

class KVCache final : public AttentionCache {
 public:
  static constexpr int kStep = 256;  // columns
  static constexpr const char* kClassName = "KVCache";

  KVCache() = default;

  // `state` = [keys, values, offset], keys and values null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<KVCache> from_state(const State& state);
  // `state` = [keys, values]; the offset is the number of columns; no meta.
  static std::unique_ptr<KVCache> from_legacy(const State& state, const Meta& meta);

  std::string class_name() const override { return kClassName; }
  std::optional<int> position() const override { return offset_; }
  int length() const override { return offset_; }
  int size() const override { return offset_; }
  bool empty() const override { return !keys_.has_value(); }
  std::size_t nbytes() const override;
  bool is_trimmable() const override { return true; }
  int max_trim() const override { return offset_; }
  int trim(int n) override;
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;

  Offset offset() const override { return offset_; }
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  Mask make_mask(int N, const MaskOptions& options = {}) const override;

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  int capacity() const;  // columns

  // Both set or both unset; 0 ≤ offset_ ≤ columns. No other alias of the buffers is kept: an update of a buffer that
  // nobody else can see is done in place by MLX, any other copies it first.
  std::optional<mlx::core::array> keys_;    // [B, Hkv, W, D]
  std::optional<mlx::core::array> values_;  // [B, Hkv, W, Dv]
  int offset_ = 0;
  // Updates since both buffers were last seen evaluated: bounds the graph when a model reads only one of them, or none.
  int num_unevaluated_updates_ = 0;
};

}  // namespace reprise
