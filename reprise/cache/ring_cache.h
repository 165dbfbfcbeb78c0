// What the sliding-window caches share, dense or quantised: a ring of max_size columns whose first `keep` are never
// evicted. Private parts of RotatingKVCache and QuantizedRotatingKVCache.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::internal {

// The numbers of a ring, as states and metas hold them.
struct RingNumbers {
  int offset = 0;
  int keep = 0;
  int max_size = 1;
  int idx = 0;
};

// Throws: corrupt_data, naming the number that is wrong, unless they fit each other and a buffer of `width` columns
// (none: no buffer). `function` opens the message.
void check_ring(const std::string& function, std::optional<int> width, const RingNumbers& numbers);

class RingCache : public AttentionCache {
 public:
  int max_size() const { return max_size_; }
  int keep() const { return keep_; }
  // Column of the next token.
  int idx() const { return idx_; }

  std::optional<int> position() const override { return offset_; }
  int length() const override { return size(); }
  int size() const override;  // min(offset, max_size)
  bool empty() const override { return !buffer_.has_value(); }
  std::size_t nbytes() const override { return buffer_ ? buffer_->nbytes() : 0; }
  bool is_trimmable() const override { return offset_ < max_size_; }
  int max_trim() const override { return is_trimmable() ? offset_ : 0; }
  int trim(int n) override;

  Offset offset() const override { return offset_; }
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  // For one token a 1-D array may come back, in the storage order of the columns that the update will return.
  Mask make_mask(int N, const MaskOptions& options = {}) const override;
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

  // The columns that hold tokens, kept ones first, then by position; none when empty.
  std::optional<KVColumns> temporal_columns() const;
  const std::optional<KVColumns>& buffer() const { return buffer_; }

 protected:
  // Throws: invalid_argument unless max_size ≥ 1 and 0 ≤ keep < max_size.
  RingCache(const std::string& function, int max_size, int keep, std::optional<KVQuantization> quantization);

  // Requires: what check_ring checks.
  void adopt(std::optional<KVColumns> buffer, int offset, int idx);

  // Keys and values for a state, whole or (`saved`) cut to the columns that hold tokens; nulls when empty.
  State::List keys_values_state(bool saved) const;

  // Invariants: no more than max_size tokens so far ⇒ idx_ = offset_; 0 ≤ idx_ ≤ columns; offset_ counts all tokens
  // ever, so it may exceed the columns. A buffer wider than max_size (after a chunk) lies in temporal order, idx_ at
  // its end. No other alias of the buffer is kept, so that MLX writes a decode step in place.
  std::optional<KVColumns> buffer_;
  int offset_ = 0;
  int max_size_;
  int keep_;
  int idx_ = 0;
  std::optional<KVQuantization> quantization_;

 private:
  struct Span {
    int begin;
    int end;
  };

  int width() const { return buffer_ ? buffer_->width() : 0; }
  int stored() const;  // columns that hold tokens
  int write_column() const;
  // The columns that hold tokens in temporal order, the first span being the kept ones, without the `dropped` oldest of
  // the others.
  std::vector<Span> temporal_spans(int dropped) const;
  // The columns of these spans that are not empty.
  std::vector<KVColumns> columns_of(const std::vector<Span>& spans) const;
  KVColumns with_chunk(const KVColumns& rows) const;
  KVColumns with_token(const KVColumns& row) const;
  // What is left of the old columns before `count` new rows, and the column of the first of them.
  struct Place {
    std::optional<KVColumns> columns;
    int at = 0;
    int capacity = 0;  // of the buffer afterwards
  };
  Place place_for(int count) const;

  PendingUpdates pending_;
};

}  // namespace reprise::internal
