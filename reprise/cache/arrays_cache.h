// Slots for recurrent state (Mamba, linear attention, short convolutions): the model reads a slot, computes the next
// state and puts it back. Nothing of it can be taken away again, so it never trims.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/layer_cache.h"

namespace reprise {

// Paddings are counted from the next column on: the model calls advance(N) once per chunk, or later chunks are masked
// as the first one was.
class ArraysCache : public LayerCache, public BatchedCache {
 public:
  static constexpr const char* kClassName = "ArraysCache";

  // `left_padding`: per row, columns before its first real token; empty for none. Throws: invalid_argument for
  // size < 0 or negative padding.
  explicit ArraysCache(int size, std::vector<int> left_padding = {});

  // `state` = [[slot, …], left_padding, lengths]: null for what is not set. Throws: corrupt_data, naming the item.
  static std::unique_ptr<ArraysCache> from_state(const State& state);
  // `state` = [slot, …]; no meta, no paddings.
  static std::unique_ptr<ArraysCache> from_legacy(const State& state, const Meta& meta);
  // Each cache is one row. A slot that none has set stays unset, one that some have set gets zeros for the others.
  // Paddings are not taken over. Throws: invalid_argument for slots that differ in number, shape or dtype.
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  // None when unset. Throws: invalid_argument for a slot that is not there.
  std::optional<mlx::core::array> get(int slot) const;
  // First axis: rows. The array is stored without what it may be a view of. Throws: invalid_argument for a slot that is
  // not there or another number of rows than the cache has.
  void set(int slot, const std::optional<mlx::core::array>& value);

  // Which of the next N columns hold real tokens: bool [B, N], or NoMask without paddings. Throws: invalid_argument for
  // N < 1.
  Mask make_mask(int N) const;
  // What remains of them, per row; may be negative; none when not set.
  const std::optional<std::vector<int>>& left_padding() const { return left_padding_; }
  const std::optional<std::vector<int>>& lengths() const { return lengths_; }
  // As batch_size, but none while nothing tells it (batch_size is 1 then).
  std::optional<int> rows() const;

  std::string class_name() const override { return kClassName; }
  std::optional<int> position() const override { return std::nullopt; }
  int length() const override { return 0; }
  int size() const override { return 0; }
  bool empty() const override { return slots_.empty() || !slots_.front(); }
  std::size_t nbytes() const override;
  bool is_trimmable() const override { return false; }
  int max_trim() const override { return 0; }
  int trim(int n) override;
  State state() const override;
  State saved_state() const override { return state(); }
  // The slots only: that layout has no place for paddings.
  State legacy_state() const override;
  Meta legacy_meta() const override { return {}; }
  // "rows": the rows of a cache in which nothing is set.
  ExtraState extra_state() const override;
  void set_extra_state(const ExtraState& extra) override;
  std::unique_ptr<LayerCache> fork() const override { return std::make_unique<ArraysCache>(*this); }
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override {
    return merge_rows(caches);
  }

  int batch_size() const override { return rows().value_or(1); }
  bool is_in_padded_prompt() const override { return lengths_.has_value(); }
  // Takes `lengths`, real tokens per row of the coming right-padded prompt; the rest does not concern it.
  void prepare(const BatchPrompt& prompt) override;
  // No more paddings.
  void finalize() override;
  void advance(int N) override;
  void filter(const std::vector<int>& rows) override;
  // Rows of a cache without lengths have no limit.
  void extend(const LayerCache& other) override;
  std::unique_ptr<LayerCache> extract(int row) const override;

 protected:
  // More slots, unset. Throws: corrupt_data for more than `size`.
  static std::unique_ptr<ArraysCache> resized(std::unique_ptr<ArraysCache> cache, int size);

 private:
  using Slot = std::optional<mlx::core::array>;

  static std::unique_ptr<ArraysCache> with_slots(std::vector<Slot> slots);
  void check_slot(const char* function, int slot) const;
  // Remembers `rows` unless something else tells it.
  void keep_rows(int rows);

  std::vector<Slot> slots_;
  std::vector<int> unevaluated_sets_;  // per slot, in a row: bounds the graph of a model that reads no slot
  // On the host, so that counting costs no graph. Known numbers of rows agree.
  std::optional<std::vector<int>> left_padding_;
  std::optional<std::vector<int>> lengths_;
  std::optional<int> rows_;  // only while neither a slot nor a padding tells
};

// Two slots: convolution state and recurrent state. Saved as ArraysCache.
class MambaCache : public ArraysCache {
 public:
  static constexpr int kSlots = 2;

  explicit MambaCache(std::vector<int> left_padding = {}) : ArraysCache(kSlots, std::move(left_padding)) {}

  // Files that name the class hold at most its two slots.
  static std::unique_ptr<ArraysCache> from_state(const State& state);
  static std::unique_ptr<ArraysCache> from_legacy(const State& state, const Meta& meta);
};

}  // namespace reprise
