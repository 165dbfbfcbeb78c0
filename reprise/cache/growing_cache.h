// What the full-history caches share, dense or quantised: every row is kept, the buffer grows in steps of 256 columns,
// trimming moves the offset. Private parts of KVCache and QuantizedKVCache.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <optional>
#include <string>

#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::internal {

class GrowingCache : public AttentionCache {
 public:
  static constexpr int kStep = kColumnStep;

  std::optional<int> position() const override { return offset_; }
  int length() const override { return offset_; }
  bool empty() const override { return !buffer_.has_value(); }
  std::size_t nbytes() const override { return buffer_ ? buffer_->nbytes() : 0; }
  bool is_trimmable() const override { return true; }
  int max_trim() const override { return offset_; }
  int trim(int n) override;
  bool keeps_all_rows() const override { return true; }

  Offset offset() const override { return offset_; }
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  Mask make_mask(int N, const MaskOptions& options = {}) const override;

 protected:
  explicit GrowingCache(std::optional<KVQuantization> quantization) : quantization_(quantization) {}

  // Keys and values for a state, whole or (`saved`) cut to the rows; nulls when empty.
  State::List keys_values_state(bool saved) const;

  // No other alias of the buffer is kept: an update of a buffer that nobody else can see is done in place by MLX, any
  // other copies it first. 0 ≤ offset_ ≤ columns.
  std::optional<KVColumns> buffer_;
  int offset_ = 0;
  std::optional<KVQuantization> quantization_;

 private:
  PendingUpdates pending_;
};

}  // namespace reprise::internal
