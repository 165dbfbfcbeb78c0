// For attention within chunks of the sequence: the query at position q sees the keys from ⌊q / chunk_size⌋ · chunk_size
// on. Grows as KVCache does; the model drops what no later query can see by maybe_trim_front() before each forward.
// Threads, Owns: see layer_cache.h.
#pragma once

#include <memory>

#include "reprise/cache/growing_cache.h"

namespace reprise {

// What a model with attention in chunks does to a cache before each forward.
class FrontTrimmedCache {
 public:
  virtual ~FrontTrimmedCache() = default;

  virtual int chunk_size() const = 0;
  // Drops at the front what no later query can see.
  virtual void maybe_trim_front() = 0;
};

class ChunkedKVCache final : public internal::GrowingCache, public FrontTrimmedCache {
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
  void maybe_trim_front() override;

  int chunk_size() const override { return chunk_size_; }
  // Position of the first stored row.
  int start_position() const { return start_; }

  std::string class_name() const override { return kClassName; }
  int size() const override { return 0; }
  // Up to the start of the first chunk that is still whole; everything while no row was dropped.
  int max_trim() const override;
  // The same of a cache whose first row is at `start`, its next at `offset`; `all` when no row was dropped.
  static int max_trim(int start, int offset, int chunk_size, int all);
  bool keeps_all_rows() const override { return false; }
  bool serves_chunks(int chunk_size) const override { return chunk_size == chunk_size_; }
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  std::unique_ptr<LayerCache> fork() const override;
  // BatchChunkedKVCache.
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override;

  const std::optional<internal::KVColumns>& buffer() const { return buffer_; }
  // Columns that are all in use, or none; then the position of the first of them.
  static std::unique_ptr<ChunkedKVCache> from_columns(int chunk_size, std::optional<internal::KVColumns> columns);
  void begin_at(int start);

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  State with_numbers(State::List items) const;

  int chunk_size_;
};

}  // namespace reprise
