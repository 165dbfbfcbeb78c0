#include "reprise/prefix/tiers/disk_index.h"

#include <algorithm>
#include <chrono>

namespace reprise::internal {
namespace {

// Rows are about 2 KB with their keys: 256 tokens of 4 bytes, in the table and in an index.
constexpr const char* kTables = R"(
CREATE TABLE entries(
  id INTEGER PRIMARY KEY,
  kind INTEGER NOT NULL,
  owner BLOB NOT NULL,
  space BLOB NOT NULL,
  parent BLOB NOT NULL,
  tokens BLOB NOT NULL,
  hash BLOB NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  file BLOB NOT NULL UNIQUE,
  nbytes INTEGER NOT NULL,
  last_used INTEGER NOT NULL);
CREATE UNIQUE INDEX entries_by_place ON entries(parent, kind, tokens);
CREATE INDEX entries_by_hash ON entries(hash);
CREATE INDEX entries_by_use ON entries(last_used, last DESC);
CREATE TABLE totals(kind INTEGER PRIMARY KEY, entries INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0), (1, 0, 0);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
  UPDATE totals SET entries = entries + 1, nbytes = nbytes + NEW.nbytes WHERE kind = NEW.kind;
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
  UPDATE totals SET entries = entries - 1, nbytes = nbytes - OLD.nbytes WHERE kind = OLD.kind;
END;
)";

// A caller waits for the index no longer than it would take to compute a block; the writer thread has time.
constexpr std::chrono::milliseconds kReaderPatience{250};
constexpr std::chrono::milliseconds kWriterPatience{10'000};

[[noreturn]] void fail_as_damaged() { throw SqliteError::damage("[DiskTier] the index contradicts itself"); }

}  // namespace

struct DiskIndex::Row {
  std::int64_t id = 0;
  std::string tokens;
  std::string file;
  std::string hash;

  int size() const { return static_cast<int>(tokens.size() / kTokenBytes); }
  // Of a statement that selects id, tokens, file, hash of a child of `parent`.
  static std::optional<Row> next(Query& query, EntryKind kind, std::string_view parent) {
    return query.step() ? std::optional(current(query, kind, parent)) : std::nullopt;
  }
  static Row current(const Query& query, EntryKind kind, std::string_view parent) {
    Row row{query.integer(0), query.blob(1), query.blob(2), query.blob(3)};
    // A flipped bit would serve one prompt with another's content.
    if (row.hash != chained_hash(kind, parent, row.tokens) || !is_hash(row.file)) {
      fail_as_damaged();
    }
    return row;
  }
};

std::optional<FoundFile> FoundFile::parse(std::string_view name) {
  const std::size_t at = name.find('-');
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view file = name.substr(0, at);
  const std::string_view key = name.substr(at + 1);
  if (!is_hash(file) || !is_hash(key)) return std::nullopt;
  return FoundFile{std::string(file), std::string(key)};
}

DiskIndex::DiskIndex(const std::filesystem::path& file, Database::Mode mode)
    : database_(file, mode, mode == Database::Mode::write ? kWriterPatience : kReaderPatience) {}

void DiskIndex::prepare() {
  // A row whose transaction is lost by a power cut leaves a file to be swept, never a row without its file: syncing at
  // checkpoints of the log is enough.
  database_.execute(
      "PRAGMA page_size = 8192; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
      "PRAGMA journal_size_limit = 16777216");
  const auto is_new = [&] {
    return database_.number("PRAGMA user_version") == 0 && database_.number("SELECT count(*) FROM sqlite_schema") == 0;
  };
  if (!is_new()) return;
  Transaction transaction(database_, Transaction::Kind::write);
  if (is_new()) {
    database_.execute(kTables);
    database_.execute(("PRAGMA application_id = " + std::to_string(kApplicationId)).c_str());
    database_.execute(("PRAGMA user_version = " + std::to_string(kDiskFormat)).c_str());
  }
  transaction.commit();
}

bool DiskIndex::has_version() { return database_.number("PRAGMA user_version") == kDiskFormat; }

bool DiskIndex::is_sound() {
  try {
    if (!has_version()) return false;
    Query check(database_, "PRAGMA integrity_check(1)");
    if (!check.step() || check.blob(0) != "ok") return false;
    Query totals(database_,
                 "SELECT (SELECT sum(entries) FROM totals) = count(*) AND "
                 "(SELECT sum(nbytes) FROM totals) = coalesce(sum(nbytes), 0) FROM entries");
    if (!totals.step() || totals.integer(0) != 1) return false;
    Query rows(database_, "SELECT id, tokens, file, hash, kind, parent FROM entries");
    while (rows.step()) Row::current(rows, static_cast<EntryKind>(rows.integer(4)), rows.blob(5));
    return true;
  } catch (const SqliteError& error) {
    if (error.is_damage()) return false;
    throw;
  }
}

void DiskIndex::reset() {
  database_.reset();
  prepare();
}

std::optional<DiskIndex::Row> DiskIndex::block(std::string_view parent, std::string_view tokens) {
  Query query(database_, "SELECT id, tokens, file, hash FROM entries WHERE parent = ? AND kind = 0 AND tokens = ?");
  query.bind(parent).bind(tokens);
  std::optional<Row> row = Row::next(query, EntryKind::block, parent);
  if (row && row->tokens != tokens) fail_as_damaged();  // a damaged index leads to a sibling
  return row;
}

std::optional<DiskIndex::Row> DiskIndex::nearest_block(std::string_view parent, std::string_view tokens,
                                                       const Ignore& ignore) {
  Query before(database_,
               "SELECT id, tokens, file, hash FROM entries WHERE parent = ? AND kind = 0 AND tokens < ? "
               "ORDER BY tokens DESC");
  Query after(database_,
              "SELECT id, tokens, file, hash FROM entries WHERE parent = ? AND kind = 0 AND tokens >= ? "
              "ORDER BY tokens");
  std::optional<Row> nearest;
  int longest = 0;
  for (Query* query : {&before, &after}) {
    query->bind(parent).bind(tokens);
    std::optional<Row> row = Row::next(*query, EntryKind::block, parent);
    while (row && ignore(row->file)) row = Row::next(*query, EntryKind::block, parent);
    if (!row) continue;
    const int common = common_tokens(row->tokens, tokens);
    if (common > longest || (common == longest && nearest && row->size() < nearest->size())) {
      longest = common;
      nearest = std::move(row);
    }
  }
  return longest > 0 ? nearest : std::nullopt;
}

std::optional<DiskIndex::Row> DiskIndex::checkpoint(std::string_view parent, std::string_view tokens,
                                                    const Ignore& ignore) {
  // A beginning of `tokens` that sorts before a row is no longer than what that row has in common with them.
  while (true) {
    std::optional<Row> row;
    {
      Query query(database_,
                  "SELECT id, tokens, file, hash FROM entries WHERE parent = ? AND kind = 1 AND tokens <= ? "
                  "ORDER BY tokens DESC LIMIT 1");
      query.bind(parent).bind(tokens);
      row = Row::next(query, EntryKind::checkpoint, parent);
    }
    if (!row) return std::nullopt;
    if (std::string_view(row->tokens) > tokens) fail_as_damaged();
    const int common = common_tokens(row->tokens, tokens);
    if (common == row->size() && !ignore(row->file)) return row;
    if (common == row->size() && common == 0) return std::nullopt;
    const int shorter = common == row->size() ? common - 1 : common;
    tokens = tokens.substr(0, static_cast<std::size_t>(shorter) * kTokenBytes);
  }
}

DiskTier::Found DiskIndex::find(const std::string& space, std::span<const TokenId> tokens, int block_size,
                                bool needs_checkpoint, const Ignore& ignore) {
  const std::string bytes = token_bytes(tokens);
  const std::size_t step = static_cast<std::size_t>(block_size) * kTokenBytes;
  DiskTier::Found found;
  std::vector<std::string> parents{space_hash(space)};  // of the whole blocks that are there
  std::string_view rest = bytes;

  const Transaction snapshot(database_, Transaction::Kind::read);
  while (!rest.empty()) {
    std::optional<Row> row;
    if (rest.size() >= step) row = block(parents.back(), rest.substr(0, step));
    const bool whole = row && !ignore(row->file);
    if (!whole) row = nearest_block(parents.back(), rest.substr(0, step), ignore);
    if (!row) break;
    const int common = whole ? block_size : common_tokens(row->tokens, rest.substr(0, step));
    found.blocks.push_back({found.length, found.length + common, row->size(), FoundFile{row->file, row->hash}.name()});
    found.length += common;
    if (!whole) break;
    parents.push_back(row->hash);
    rest.remove_prefix(step);
  }
  if (!needs_checkpoint) return found;

  const std::string_view covered =
      std::string_view(bytes).substr(0, static_cast<std::size_t>(found.length) * kTokenBytes);
  int length = 0;
  for (std::size_t level = parents.size(); level-- > 0 && length == 0;) {
    if (level * step > covered.size()) continue;
    const std::string_view behind = covered.substr(level * step).substr(0, step - kTokenBytes);
    const std::optional<Row> row = checkpoint(parents[level], behind, ignore);
    if (!row) continue;
    length = static_cast<int>(level) * block_size + row->size();
    if (length > 0) found.checkpoint = FoundFile{row->file, row->hash}.name();
  }
  found.length = length;
  while (!found.blocks.empty() && found.blocks.back().begin >= length) found.blocks.pop_back();
  if (!found.blocks.empty()) found.blocks.back().end = std::min(found.blocks.back().end, length);
  return found;
}

std::optional<std::uint64_t> DiskIndex::nbytes(const std::string& file) {
  Query query(database_, "SELECT nbytes FROM entries WHERE file = ?");
  return query.bind(file).step() ? std::optional(static_cast<std::uint64_t>(query.integer(0))) : std::nullopt;
}

std::optional<std::string> DiskIndex::covering(const EntryKey& key) {
  Query query(database_,
              "SELECT id, tokens, file, hash FROM entries WHERE parent = ? AND kind = ? AND tokens >= ? "
              "ORDER BY tokens LIMIT 1");
  query.bind(key.parent).bind(static_cast<std::int64_t>(key.kind)).bind(key.tokens);
  const std::optional<Row> row = Row::next(query, key.kind, key.parent);
  if (!row) return std::nullopt;
  const bool covers = key.kind == EntryKind::block ? row->tokens.starts_with(key.tokens) : row->tokens == key.tokens;
  return covers ? std::optional(row->file) : std::nullopt;
}

bool DiskIndex::has_parent(const EntryKey& key) {
  if (key.parent == key.space) return true;
  Query query(database_, "SELECT 1 FROM entries WHERE hash = ? AND kind = 0");
  return query.bind(key.parent).step();
}

DiskTotals DiskIndex::totals() {
  Query query(database_, "SELECT kind, entries, nbytes FROM totals");
  DiskTotals totals;
  while (query.step()) {
    (query.integer(0) == 0 ? totals.blocks : totals.checkpoints) = static_cast<std::uint64_t>(query.integer(1));
    totals.nbytes += static_cast<std::uint64_t>(query.integer(2));
  }
  return totals;
}

}  // namespace reprise::internal
