// One layer's paged caches of several sequences as the batch that a model steps through: each row stays its own cache,
// of its own length; nothing is copied to form the batch or to leave it.
// Threads: see layer_cache.h. The rows must outlive it; whoever changes a row by other means than this batch, between
// its calls, may do so.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reprise/cache/paged_kv_cache.h"

namespace reprise {

class PagedBatch final : public AttentionCache {
 public:
  static constexpr const char* kClassName = "PagedBatch";

  // Throws: invalid_argument for no rows, null, one twice, or rows that see, or are quantised, differently.
  explicit PagedBatch(std::vector<PagedKVCache*> rows);

  std::string class_name() const override { return kClassName; }
  std::optional<int> position() const override { return std::nullopt; }
  std::vector<int> positions() const override;
  int length() const override;  // of the longest row
  int size() const override { return length(); }
  bool empty() const override;
  std::size_t nbytes() const override;
  bool is_trimmable() const override { return true; }
  int max_trim() const override;  // what every row can give up
  int trim(int n) override;       // the same of each
  bool keeps_all_rows() const override;
  // Unsupported: save the rows.
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  void collect_arrays(std::vector<mlx::core::array>& out) const override;
  void check() const override;
  std::unique_ptr<LayerCache> fork() const override;  // owns forks of the rows

  Offset offset() const override;  // int32 [B]
  // Unsupported, also store: a batch of unequal rows has no one block of keys. A model that cannot go by attend runs
  // row by row.
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  // NoMask for one token, else Causal; what is visible is applied by attend itself. Throws: unsupported for an array,
  // or what the rows do not see by themselves.
  Mask make_mask(int N, const MaskOptions& options = {}) const override;
  Mask make_chunk_mask(int N, int chunk_size) const override;
  bool serves_chunks(int chunk_size) const override;
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  std::vector<PagedKVCache*> rows_;
  std::vector<std::unique_ptr<PagedKVCache>> owned_;  // of a fork
};

}  // namespace reprise
