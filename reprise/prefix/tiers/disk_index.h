// Which token prefixes a disk tier's folder has files of: one connection to its SQLite index. Private to tiers.
// Siblings among blocks are never the beginning of one another, so the two neighbours of a place in their order are the
// ones that agree longest with what would stand there.
// Threads: one object belongs to one thread at a time; several connections, of other processes too, work side by side.
// Everything throws SqliteError; rows that contradict themselves are damage.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reprise/prefix/tiers/disk_keys.h"
#include "reprise/prefix/tiers/disk_tier.h"
#include "reprise/prefix/tiers/sqlite_database.h"

namespace reprise::internal {

// What find() calls a file: its own hash, and that of the key under which it was found. A file says of which key it is.
struct FoundFile {
  std::string file;
  std::string key;
  std::string name() const { return file + "-" + key; }
  static std::optional<FoundFile> parse(std::string_view name);
};

struct DiskTotals {
  std::uint64_t blocks = 0, checkpoints = 0, nbytes = 0;
};

class DiskIndex {
 public:
  // Whether a file is to be taken as not there.
  using Ignore = std::function<bool(const std::string& file)>;

  // Looks at nothing in `file` yet.
  DiskIndex(const std::filesystem::path& file, Database::Mode mode);
  // Before it is used for writing: makes the tables in an empty file.
  void prepare();

  bool has_version();
  // Whether nothing in it is at fault either: linear in its size.
  bool is_sound();
  // Empties it, whatever it was.
  void reset();

  DiskTier::Found find(const std::string& space, std::span<const TokenId> tokens, int block_size, bool needs_checkpoint,
                       const Ignore& ignore);
  // Bytes of a file that has a row.
  std::optional<std::uint64_t> nbytes(const std::string& file);
  // The file of a block that begins with this one, or of this checkpoint.
  std::optional<std::string> covering(const EntryKey& key);
  // Whether what `key` stands behind is there.
  bool has_parent(const EntryKey& key);
  DiskTotals totals();

  // The names of files that lost their rows are added to `dropped`.
  using Names = std::vector<std::string>;
  // Least recently used first, and nothing before what stands behind it; never the parent of `key`, if given.
  // Returns: whether `nbytes` now fit into max_bytes.
  bool make_room(std::uint64_t nbytes, std::uint64_t max_bytes, const EntryKey* key, Names& dropped);
  // A row for a file that is there, if `is_there()` says so under the lock, in place of those of shorter blocks that it
  // begins with. Returns: whether it was there.
  // `owner`: a hash.
  bool insert(const EntryKey& key, const std::string& owner, const std::string& file, std::uint64_t nbytes,
              const std::function<bool()>& is_there, Names& dropped);
  // The last of `files` becomes the most recently used.
  void touch(const Names& files);
  void remove(const std::string& file, Names& dropped);
  // All of one owner, or of one space. Both are hashes.
  void clear_owner(const std::string& owner, Names& dropped);
  void clear_space(const std::string& space, Names& dropped);
  // Calls unlink(name) for those of `files` that no row names; nobody inserts meanwhile.
  void unlink_unused(const Names& files, const std::function<void(const std::string&)>& unlink);

 private:
  struct Row;
  std::optional<Row> block(std::string_view parent, std::string_view tokens);
  // Of the children of `parent`, the one that agrees longest with `tokens`.
  std::optional<Row> nearest_block(std::string_view parent, std::string_view tokens, const Ignore& ignore);
  // Of the checkpoints behind `parent`, that of the longest beginning of `tokens`.
  std::optional<Row> checkpoint(std::string_view parent, std::string_view tokens, const Ignore& ignore);
  // Removes a row, and checkpoints within a block that nothing covers without it. Returns: bytes.
  std::uint64_t remove_row(std::int64_t id, Names& dropped);
  // `select` and `remove`: what to do with rows of the blob `value`.
  void clear(const char* select, const char* remove, const std::string& value, Names& dropped);
  // A number of use above all others.
  std::int64_t next_use();

  Database database_;
};

}  // namespace reprise::internal
