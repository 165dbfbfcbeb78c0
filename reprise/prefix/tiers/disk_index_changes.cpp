// What changes the index.
#include "reprise/prefix/tiers/disk_index.h"

namespace reprise::internal {

bool DiskIndex::make_room(std::uint64_t nbytes, std::uint64_t max_bytes, const EntryKey* key, Names& dropped) {
  if (nbytes > max_bytes) return false;
  std::uint64_t held = totals().nbytes;
  if (held + nbytes <= max_bytes) return true;
  const std::string keep = key != nullptr ? key->parent : std::string();
  Names files;
  Transaction transaction(database_, Transaction::Kind::write);
  held = totals().nbytes;
  while (held + nbytes > max_bytes) {
    std::int64_t id = 0;
    {
      Query query(database_,
                  "SELECT id FROM entries AS entry WHERE hash <> ? AND "
                  "(kind = 1 OR NOT EXISTS (SELECT 1 FROM entries AS child WHERE child.parent = entry.hash)) "
                  "ORDER BY last_used, last DESC LIMIT 1");
      query.bind(keep);
      if (!query.step()) break;
      id = query.integer(0);
    }
    held -= std::min(held, remove_row(id, files));
  }
  transaction.commit();
  dropped.insert(dropped.end(), files.begin(), files.end());
  return held + nbytes <= max_bytes;
}

bool DiskIndex::insert(const EntryKey& key, const std::string& owner, const std::string& file, std::uint64_t nbytes,
                       const std::function<bool()>& is_there, Names& dropped) {
  Names files;
  Transaction transaction(database_, Transaction::Kind::write);
  if (!is_there()) return false;
  if (const std::optional<std::string> covering_file = covering(key)) {
    // Somebody was faster. What was written is of no use, unless it is the same.
    if (*covering_file != file) dropped.push_back(file);
    return true;
  }
  if (key.kind == EntryKind::block) {
    // One at most: of two beginnings of this block one would be the beginning of the other.
    Query query(database_,
                "SELECT id, tokens, file FROM entries WHERE parent = ? AND kind = 0 AND tokens < ? "
                "ORDER BY tokens DESC LIMIT 1");
    query.bind(key.parent).bind(key.tokens);
    if (query.step() && std::string_view(key.tokens).starts_with(query.blob(1))) {
      Query shorter(database_, "DELETE FROM entries WHERE id = ?");
      shorter.bind(query.integer(0)).run();
      files.push_back(query.blob(2));
    }
  }
  const std::int64_t used = next_use();
  {
    Query query(database_,
                "INSERT INTO entries(kind, owner, space, parent, tokens, hash, first, last, file, nbytes, last_used) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    query.bind(static_cast<std::int64_t>(key.kind))
        .bind(owner)
        .bind(key.space)
        .bind(key.parent)
        .bind(key.tokens)
        .bind(key.hash);
    query.bind(std::int64_t{key.begin}).bind(std::int64_t{key.end}).bind(file);
    query.bind(static_cast<std::int64_t>(nbytes)).bind(used).run();
  }
  transaction.commit();
  dropped.insert(dropped.end(), files.begin(), files.end());
  return true;
}

std::int64_t DiskIndex::next_use() {
  // Only damage is beyond it.
  constexpr std::int64_t kMost = std::int64_t{1} << 62U;
  const std::int64_t last = database_.number("SELECT max(last_used) FROM entries");
  if (last >= 0 && last < kMost) return last + 1;
  Query query(database_, "UPDATE entries SET last_used = 0 WHERE last_used NOT BETWEEN 0 AND ?");
  query.bind(kMost - 1).run();
  return database_.number("SELECT max(last_used) FROM entries") + 1;
}

void DiskIndex::touch(const Names& files) {
  Transaction transaction(database_, Transaction::Kind::write);
  for (const std::string& file : files) {
    const std::int64_t used = next_use();
    Query query(database_, "UPDATE entries SET last_used = ? WHERE file = ?");
    query.bind(used).bind(file).run();
  }
  transaction.commit();
}

std::uint64_t DiskIndex::remove_row(std::int64_t id, Names& dropped) {
  bool is_block = false;
  std::string parent;
  std::string tokens;
  std::uint64_t nbytes = 0;
  {
    Query query(database_, "SELECT kind, parent, tokens, file, nbytes FROM entries WHERE id = ?");
    query.bind(id);
    if (!query.step()) return 0;
    is_block = query.integer(0) == 0;
    parent = query.blob(1);
    tokens = query.blob(2);
    dropped.push_back(query.blob(3));
    nbytes = static_cast<std::uint64_t>(query.integer(4));
  }
  {
    Query query(database_, "DELETE FROM entries WHERE id = ?");
    query.bind(id).run();
  }
  if (!is_block) return nbytes;
  std::vector<std::int64_t> uncovered;
  {
    Query query(database_,
                "SELECT id FROM entries AS entry WHERE parent = ? AND kind = 1 AND length(tokens) > 0 AND "
                "substr(?, 1, length(tokens)) = tokens AND NOT EXISTS (SELECT 1 FROM entries AS block "
                "WHERE block.parent = entry.parent AND block.kind = 0 AND "
                "substr(block.tokens, 1, length(entry.tokens)) = entry.tokens)");
    query.bind(parent).bind(tokens);
    while (query.step()) uncovered.push_back(query.integer(0));
  }
  for (const std::int64_t checkpoint : uncovered) nbytes += remove_row(checkpoint, dropped);
  return nbytes;
}

void DiskIndex::remove(const std::string& file, Names& dropped) {
  Names files{file};  // it goes, whether it has a row or not
  Transaction transaction(database_, Transaction::Kind::write);
  std::int64_t id = 0;
  {
    Query query(database_, "SELECT id FROM entries WHERE file = ?");
    if (query.bind(file).step()) id = query.integer(0);
  }
  if (id != 0) remove_row(id, files);
  transaction.commit();
  dropped.insert(dropped.end(), files.begin(), files.end());
}

void DiskIndex::clear(const char* select, const char* remove, const std::string& value, Names& dropped) {
  Names files;
  Transaction transaction(database_, Transaction::Kind::write);
  {
    Query query(database_, select);
    query.bind(value);
    while (query.step()) files.push_back(query.blob(0));
  }
  Query query(database_, remove);
  query.bind(value).run();
  transaction.commit();
  dropped.insert(dropped.end(), files.begin(), files.end());
}

void DiskIndex::clear_owner(const std::string& owner, Names& dropped) {
  clear("SELECT file FROM entries WHERE owner = ?", "DELETE FROM entries WHERE owner = ?", owner, dropped);
}

void DiskIndex::clear_space(const std::string& space, Names& dropped) {
  clear("SELECT file FROM entries WHERE space = ?", "DELETE FROM entries WHERE space = ?", space, dropped);
}

void DiskIndex::unlink_unused(const Names& files, const std::function<void(const std::string&)>& unlink) {
  if (files.empty()) return;
  const Transaction nobody_inserts(database_, Transaction::Kind::write);
  for (const std::string& file : files) {
    Query query(database_, "SELECT 1 FROM entries WHERE file = ?");
    if (!query.bind(file).step()) unlink(file);
  }
}

}  // namespace reprise::internal
