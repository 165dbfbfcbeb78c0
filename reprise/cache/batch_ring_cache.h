// What the sliding-window caches of several rows share, dense or quantised: one ring for all rows, whose newest tokens
// lie in one column; shorter rows begin after padding. Private parts of BatchRotatingKVCache and
// BatchQuantizedRotatingKVCache.
//
// Sinks: with keep > 0 the buffer begins with `keep` columns that hold each row's first tokens, written when they come,
// whatever the row's place in the ring; the ring has the other max_size - keep. A first token's copy in the ring is
// never shown. So the rows of a batch may be of any lengths, and every row sees what it would see alone.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/batched_cache.h"
#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::internal {

class RingCache;
class StateReader;

// Of a row's padding, and of what a state may count: sums of such numbers stay far from what int32 positions hold.
inline constexpr int kMaxCount = 1 << 29;

class BatchRingCache : public AttentionCache, public BatchedCache {
 public:
  int max_size() const { return max_size_; }
  int keep() const { return keep_; }
  // Column of the next token in the buffer, the same for all rows; 0 without a buffer.
  int idx() const { return buffer_ ? keep_ + idx_ : 0; }
  // The oldest column is at idx(): the ring has gone round.
  bool rotated() const { return rotated_; }
  // Columns that updates brought, padding included.
  int columns_written() const { return columns_written_; }
  // Columns before each row's first token. Without sinks mlx-lm's number: negative when the row's tokens were evicted.
  std::vector<int> left_padding() const;

  std::optional<int> position() const override { return std::nullopt; }
  // Negative as long as a row's left padding is still to come.
  std::vector<int> positions() const override;
  int length() const override { return size(); }
  int size() const override;  // min(columns written, max_size)
  bool empty() const override { return !buffer_.has_value(); }
  std::size_t nbytes() const override { return buffer_ ? buffer_->nbytes() : 0; }
  // No row may have lost a token.
  bool is_trimmable() const override;
  int max_trim() const override { return is_trimmable() ? columns_written_ : 0; }
  // All rows by as many columns, in the order in which they came; a row with fewer tokens ends with none.
  int trim(int n) override;

  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  // keep (the state of a quantised class has it), the limits of a pending prompt, counters that the state does not
  // tell.
  ExtraState extra_state() const override;
  void set_extra_state(const ExtraState& extra) override;

  Offset offset() const override;
  // Throws also: failed_precondition for one column while right padding is pending.
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  // Always an array [B, 1, N, columns that the update will return], in their storage order.
  Mask make_mask(int N, const MaskOptions& options = {}) const override;
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

  int batch_size() const override { return static_cast<int>(rows_.size()); }
  bool is_in_padded_prompt() const override;
  // Ends a prompt that is still pending when it announces right padding, which needs lengths too.
  void prepare(const BatchPrompt& prompt) override;
  void finalize() override;
  // Columns stay as they are; of no rows nothing is left but their form.
  void filter(const std::vector<int>& rows) override;
  void extend(const LayerCache& other) override;
  std::unique_ptr<LayerCache> extract(int row) const override;

 protected:
  static constexpr int kNoLimit = std::numeric_limits<int>::max();

  struct Row {
    int offset = 0;        // tokens consumed, pending filler included; negative while left padding is still to come
    int padding = 0;       // mlx-lm's left_padding
    int stored = 0;        // of the offset, the last ones whose columns the ring still has
    int limit = kNoLimit;  // offset at which the filler of a right-padded prompt begins
    int moved = 0;         // columns of that filler that lie before the row's tokens by now

    int filler() const { return offset > limit ? offset - limit : 0; }
  };
  // The numbers of a state besides the rows'.
  struct Numbers {
    int max_size = 1;
    int columns_written = 0;
    int idx = 0;
    bool rotated = false;
  };

  // Throws: invalid_argument unless max_size ≥ 1, 0 ≤ keep < max_size and no padding is negative.
  BatchRingCache(const std::string& function, int max_size, std::vector<int> left_padding, int keep,
                 std::optional<KVQuantization> quantization);

  // Reads items 0 … 3 (keys, values, offset, left_padding) into this empty cache without rows, keep being 0.
  // Throws: corrupt_data.
  void load(const StateReader& reader, const Numbers& numbers);
  // Takes the first columns of a loaded buffer for sinks. Throws: corrupt_data.
  void set_keep(const std::string& function, std::int64_t keep);
  // One row for each of `sources`, into this empty cache with as many rows. Throws: invalid_argument for several rows
  // in one source, or other numbers or forms than this cache's.
  void merge_from(const std::string& function, const std::vector<const RingCache*>& sources);
  // Everything but the form, from a cache with as many rows.
  void copy_from(const BatchRingCache& other, std::optional<KVColumns> buffer);

  // A row's class, around columns in temporal order that are all in use; none for a row of an empty batch.
  virtual std::unique_ptr<LayerCache> single_cache(std::optional<KVColumns> columns, int offset) const = 0;

  const std::optional<KVColumns>& buffer() const { return buffer_; }

  std::optional<KVQuantization> quantization_;

 private:
  int ring_size() const { return max_size_ - keep_; }
  // How far each row must roll so that its filler lies before it; `rows` are then those.
  static std::vector<int> move_filler(std::vector<Row>& rows);
  // Columns lie again as they came: undoes what move_filler did in a prompt that is still pending.
  void move_filler_back();
  // What `stored` is when nothing else is known.
  int expected_stored(const Row& row) const;
  State numbered_state(bool saved) const;
  // keys, values, offset, left_padding; `saved`: only columns that hold tokens.
  State::List rows_state(bool saved) const;

  // The ring's part of a buffer that lies like buffer_.
  KVColumns ring_of(const KVColumns& buffer) const { return buffer.slice(keep_, buffer.width()); }
  // Columns of the ring that are in use.
  int ring_width() const { return !buffer_ ? 0 : rotated_ ? ring_size() : idx_; }
  // These, oldest first, of a buffer that lies like buffer_.
  KVColumns temporal_ring_of(const KVColumns& buffer) const;
  KVColumns with_sinks(const KVColumns& sinks, const KVColumns& ring) const;
  // The sinks after an update with `added`, before which the rows were `rows`; none when they stay as they are.
  std::optional<KVColumns> next_sinks(const KVColumns& added, const std::vector<Row>& rows) const;
  void append_chunk(const KVColumns& added);
  void append_one(const KVColumns& added);
  // What one more column changes, besides the column itself.
  struct NextColumn {
    std::optional<KVColumns> columns;  // those that exist, none for none
    int capacity = 0;                  // columns of the buffer afterwards
    int idx = 0;                       // of the new column, in the ring
    bool rotated = false;
    std::vector<Row> rows;
  };
  NextColumn next_column() const;
  void commit(NextColumn next, KVColumns buffer);
  // Whether `width` new columns bring a row one of its first tokens.
  bool brings_sinks(int width, const std::vector<Row>& rows) const;
  void check_row(const std::string& function, int row) const;
  // These rows' buffer with the newest column at ring column `idx` of `width`, in the form of `like`. `temporal`:
  // oldest column first.
  KVColumns justified(bool temporal, int idx, int width, const KVColumns& like) const;

  // Invariants: the ring's last min(stored, columns in use) columns are a row's latest tokens (before its filler), at
  // least as many as the row alone would need; rotated ⇒ the ring has ring_size() columns; more columns than that ⇒
  // idx_ is behind them. No other alias of the buffer is kept, so that MLX can update it in place.
  std::optional<KVColumns> buffer_;  // keep_ columns of sinks, then the ring
  std::vector<Row> rows_;
  int max_size_;
  int keep_;
  int columns_written_ = 0;
  int idx_ = 0;  // in the ring
  bool rotated_ = false;
  PendingUpdates pending_;
};

}  // namespace reprise::internal
