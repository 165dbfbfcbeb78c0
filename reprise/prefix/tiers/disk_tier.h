// Blocks and checkpoints on disk: one safetensors file each, named by the hash of its bytes, found through a SQLite
// index of token prefixes. Written behind the caller's back by one thread, atomically (the file first, then its row);
// verified by hash on every read, and told apart by the prefix that a file says it is of. A file that is missing or
// damaged is a counted miss and its row goes. Several processes may use one folder: rows and files come and go under
// each other's eyes, and every race ends in a miss, never in a wrong answer. Folder 0700, files 0600.
// The layout: docs/prefix_cache_disk.md. Nothing but bad_alloc and bad arguments is thrown once it is open.
// Threads: any, internally locked. Owns: the writer thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/prefix/prefix_tree.h"
#include "reprise/prefix/tiers/tensor_file.h"
#include "reprise/storage/file_system.h"

namespace reprise {

struct DiskTierOptions {
  std::filesystem::path folder;
  std::string owner = {};                                 // of several spaces: what clear() removes all of
  std::size_t max_bytes = std::size_t{8} << 30;           // of files; least recently used ones go
  int block_size = 256;                                   // of the tree above it
  std::size_t max_queued_bytes = std::size_t{256} << 20;  // beyond it what comes to be written is dropped and counted
  FileSystem* file_system = nullptr;                      // null: the real one
  // What is written as tensors, on the writer thread; empty: to_tensors of prompt_blocks.h.
  std::function<TensorFile(const Stored&)> to_tensors = {};
};

struct DiskTierStats {
  std::uint64_t blocks = 0, checkpoints = 0, nbytes = 0;  // in the index
  std::uint64_t hits = 0, misses = 0, writes = 0, evictions = 0;
  std::uint64_t damaged = 0;         // files that were not what they should be; an index that was emptied
  std::uint64_t failed_writes = 0;   // disk full, read-only folder, …: each is logged once per reason
  std::uint64_t dropped_writes = 0;  // the queue or the budget was full, or what leads there is not stored
  std::string last_error;            // of a write or of the index; empty: none
};

class DiskTier {
 public:
  // Opens or makes the folder and its index; an index that is damaged or of another version is emptied, which is
  // counted, and files without rows are swept. A folder that cannot be written is used for reading, with failed_writes
  // counted. The permissions of others are taken from a folder that is there; if they could write, it is emptied, which
  // is counted as damage.
  // Throws: invalid_argument when `folder` is no folder, holds anything that is not a disk tier's, which is named and
  // left as it is, or it or something in it belongs to another user, or others can write it and it cannot be emptied;
  // internal when it can be neither made nor read.
  explicit DiskTier(const DiskTierOptions& options);
  ~DiskTier();  // writes what is queued
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // What of a prefix is there. Reads the index only.
  struct Found {
    struct Piece {
      int begin = 0;
      int end = 0;       // of what can be used of it
      int size = 0;      // tokens it holds, ≥ end - begin
      std::string file;  // for read()
    };
    int length = 0;
    std::vector<Piece> blocks;
    std::optional<std::string> checkpoint;  // the state after exactly `length` tokens
  };
  // The longest prefix of `tokens` in `space`; with needs_checkpoint the longest at which there is a checkpoint.
  Found find(const std::string& space, std::span<const TokenId> tokens, bool needs_checkpoint);

  // The content of a file that find() has named, verified; none when it is gone or damaged (counted, its row is
  // removed). Its row becomes the most recently used.
  std::optional<TensorFile> read(const std::string& file);

  // Queues what is stored under the last of `tokens`: a block of tokens [begin, tokens.size()), or a checkpoint. It is
  // turned into tensors on the writer thread. What is there already is only touched. A block takes the place of shorter
  // ones that it begins with. What cannot be reached, because a whole block before it is not stored, is dropped.
  void write_block(const std::string& space, std::span<const TokenId> tokens, int begin, StoredRef content);
  struct Block {
    int begin = 0;
    int end = 0;
    StoredRef content;
  };
  // The same for several blocks [begin, end) of `tokens`, in time that is linear in the tokens.
  void write_blocks(const std::string& space, std::span<const TokenId> tokens, std::vector<Block> blocks);
  void write_checkpoint(const std::string& space, std::span<const TokenId> tokens, StoredRef content);
  // Until everything queued is on disk or has failed.
  void flush();
  // Removes all of one space, or all of this owner's.
  void clear(const std::optional<std::string>& space = {});

  DiskTierStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
