// For attention within chunks of the sequence: the query at position q sees the keys from ⌊q / chunk_size⌋ · chunk_size
// on. Grows as KVCache does; the model drops what no later query can see by maybe_trim_front() before each forward.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/growing_cache.h"

namespace reprise {

class ChunkedKVCache final : public internal::GrowingCache {
 public:
  static constexpr const char* kClassName = "ChunkedKVCache";

  // Throws: invalid_argument for chunk_size < 1.
  explicit ChunkedKVCache(int chunk_size);

  // `state` = [keys, values, offset, chunk_size, start_position], keys and values null when empty.
  // Throws: corrupt_data, naming the item that is wrong.
  static std::unique_ptr<ChunkedKVCache> from_state(const State& state);
  // `state` = [keys, values]; meta = chunk_size, start_position; the offset is start_position + columns.
  static std::unique_ptr<ChunkedKVCache> from_legacy(const State& state, const Meta& meta);

  // Keeps the last chunk_size rows when there are more: the buffer is then exactly as wide.
  void maybe_trim_front();

  int chunk_size() const { return chunk_size_; }
  // Position of the first stored row.
  int start_position() const { return start_; }

  std::string class_name() const override { return kClassName; }
  int size() const override { return 0; }
  // Up to the start of the first chunk that is still whole; everything while no row was dropped.
  int max_trim() const override;
  bool keeps_all_rows() const override { return false; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  State with_numbers(State::List items) const;

  int chunk_size_;
};

}  // namespace reprise
