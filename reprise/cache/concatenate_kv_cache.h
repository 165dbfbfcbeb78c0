// The plainest cache: every update concatenates, so the buffer is as wide as the rows in it. For big blocks, and the
// reference that other classes are compared with. Rows that trim gave up are cut off by the next update; until then
// nbytes() counts them and nobody sees them. Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/growing_cache.h"

namespace reprise {

class ConcatenateKVCache final : public internal::GrowingCache {
 public:
  static constexpr const char* kClassName = "ConcatenateKVCache";

  ConcatenateKVCache() : GrowingCache(std::nullopt) {}

  // `state` = [keys, values], null when empty; the offset is the number of columns.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<ConcatenateKVCache> from_state(const State& state);
  // The same, and no meta.
  static std::unique_ptr<ConcatenateKVCache> from_legacy(const State& state, const Meta& meta);

  std::string class_name() const override { return kClassName; }
  int size() const override { return 0; }
  // Cut to the rows, since the columns are all that tells the offset.
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  // In parts: this is what the kernel's results are compared with.
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

 protected:
  internal::KVColumns appended(const internal::KVColumns& rows) const override;
  void restore(LayerCache&& earlier) override;
};

}  // namespace reprise
