// What the growing caches of several rows share, dense or quantised: all rows end at one column, shorter ones begin
// after padding. Private parts of BatchKVCache, BatchQuantizedKVCache and
// BatchChunkedKVCache.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/batched_cache.h"
#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::internal {

class StateReader;

class BatchGrowingCache : public AttentionCache, public BatchedCache {
 public:
  static constexpr int kStep = kColumnStep;

  // Columns before each row's first real token.
  const std::vector<int>& left_padding() const { return left_padding_; }
  // Filler that finalize will move before the rows; empty when nothing is pending.
  const std::vector<int>& right_padding() const { return right_padding_; }
  bool is_in_padded_prompt() const override { return !right_padding_.empty(); }
  // Column of the next token, the same for all rows.
  int idx() const { return idx_; }

  std::optional<int> position() const override { return std::nullopt; }
  // Negative as long as a row's left padding is still to come.
  std::vector<int> positions() const override;
  // Padding columns included.
  int length() const override { return idx_; }
  int size() const override { return idx_; }
  bool empty() const override { return !buffer_.has_value(); }
  std::size_t nbytes() const override { return buffer_ ? buffer_->nbytes() : 0; }
  bool is_trimmable() const override { return true; }
  int max_trim() const override { return idx_; }
  // All rows by as many columns; a row with fewer tokens ends with none. Announced right padding stays announced.
  int trim(int n) override;
  bool keeps_all_rows() const override { return true; }
  ExtraState extra_state() const override;
  void set_extra_state(const ExtraState& extra) override;

  Offset offset() const override;
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  // Always an array [B, 1, N, idx + N]: causal, without padding, the window applied.
  Mask make_mask(int N, const MaskOptions& options = {}) const override;
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  // Rows cost what they hold, padding is not read.
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

  int batch_size() const override { return static_cast<int>(left_padding_.size()); }
  void prepare(const BatchPrompt& prompt) override;
  // A row with fewer columns than right padding ends with no tokens.
  void finalize() override;
  // Then removes the padding that all rows have; of no rows nothing is left but their form.
  void filter(const std::vector<int>& rows) override;
  void extend(const LayerCache& other) override;
  std::unique_ptr<LayerCache> extract(int row) const override;

 protected:
  // What a cache is made of. Invariants: paddings are not negative, idx ≤ the buffer's columns (0 without one), one
  // padding for each row of the buffer.
  struct Parts {
    std::optional<KVColumns> buffer;
    std::vector<int> left_padding;
    int idx = 0;
  };
  // One row of a merge.
  struct Source {
    const std::optional<KVColumns>& buffer;
    int length;
  };

  // Throws: invalid_argument for negative padding.
  BatchGrowingCache(const std::string& function, std::vector<int> left_padding,
                    std::optional<KVQuantization> quantization);

  // Items 0 … 3 (keys, values, offset, left_padding), then idx as item 4, or the number of columns where the layout has
  // no such item. `starts`: receives the position of each row's first stored token; null: 0 for all.
  // Throws: corrupt_data.
  static Parts read_parts(const StateReader& reader, const std::optional<KVQuantization>& quantization, bool has_idx,
                          std::vector<int>* starts = nullptr);
  // Right-justified. Throws: invalid_argument for a source that has several rows or another form than the first.
  static Parts merged_parts(const std::string& function, const std::vector<Source>& sources);
  void assign(Parts parts);

  // keys, values, offset, left_padding; `saved`: buffers cut to the columns in use.
  State::List rows_state(bool saved) const;
  // The class of one row, around columns that are all in use; none for a row of an empty batch.
  virtual std::unique_ptr<LayerCache> single_cache(std::optional<KVColumns> columns) const = 0;

  // No other alias of the buffer is kept, so that MLX can update it in place.
  std::optional<KVColumns> buffer_;
  std::vector<int> left_padding_;
  std::vector<int> right_padding_;
  int idx_ = 0;
  std::optional<KVQuantization> quantization_;

 private:
  void check_rows(const std::string& function, const std::vector<int>& rows) const;
  // These rows, right-justified at column `idx` of `width`, in the form of `like`.
  KVColumns justified(int idx, int width, const KVColumns& like) const;

  PendingUpdates pending_;
};

}  // namespace reprise::internal
