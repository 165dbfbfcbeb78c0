// What the caches share that append rows behind the ones they have, dense or quantised: the buffer grows in steps of
// 256 columns, trimming moves the offset. Private parts of KVCache, QuantizedKVCache, ConcatenateKVCache and
// ChunkedKVCache.
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
  int length() const override { return offset_ - start_; }
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
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

 protected:
  explicit GrowingCache(std::optional<KVQuantization> quantization) : quantization_(quantization) {}

  // Keys and values for a state, whole or (`saved`) cut to the rows; nulls when empty.
  State::List keys_values_state(bool saved) const;

  // The buffer that holds `rows` behind the stored ones.
  virtual KVColumns appended(const KVColumns& rows) const { return grown(buffer_, length(), rows); }

  // No other alias of the buffer is kept: an update of a buffer that nobody else can see is done in place by MLX, any
  // other copies it first. The stored rows are its first length() columns; 0 ≤ start_ ≤ offset_.
  std::optional<KVColumns> buffer_;
  int offset_ = 0;  // tokens consumed
  int start_ = 0;   // tokens whose rows were dropped at the front
  std::optional<KVQuantization> quantization_;

 private:
  PendingUpdates pending_;
};

}  // namespace reprise::internal
