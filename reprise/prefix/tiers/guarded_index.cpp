#include "reprise/prefix/tiers/guarded_index.h"

#include "reprise/base/error.h"

namespace reprise::internal {
namespace {

constexpr std::chrono::minutes kSound{1};

void check_version(DiskIndex& index) {
  if (!index.has_version()) throw Error(ErrorCode::unsupported, "[DiskTier] the index is of another version");
}

}  // namespace

GuardedIndex::GuardedIndex(DiskFolder& folder) : folder_(folder) {}

GuardedIndex::~GuardedIndex() {
  reader_.reset();
  writer_.reset();  // the last one to be closed empties SQLite's log, which a reader may not
}

void GuardedIndex::open_reader() {
  if (reader_) return;
  reader_.emplace(folder_.index_file(), Database::Mode::read);
  try {
    check_version(*reader_);
  } catch (const SqliteError& error) {
    if (error.is_damage() || folder_.is_writable()) throw;
    reader_.emplace(folder_.index_file(), Database::Mode::read_still);
    check_version(*reader_);
  }
}

void GuardedIndex::open_writer() {
  if (writer_) return;
  folder_.create_index_file();
  writer_.emplace(folder_.index_file(), Database::Mode::write);
  writer_->prepare();
  check_version(*writer_);
}

void GuardedIndex::repair() {
  suspect_ = true;  // no reader comes in between
  writer_.reset();
  {
    const std::lock_guard lock(reading_);
    reader_.reset();
  }
  const DiskFolder::Opening opening(folder_);
  folder_.create_index_file();
  DiskIndex index(folder_.index_file(), Database::Mode::write);
  // Somebody else may have done it.
  const auto now = std::chrono::steady_clock::now();
  if (now >= sound_until_ && index.is_sound()) {
    sound_until_ = now + kSound;
  } else {
    index.reset();
    ++emptied_;
  }
  suspect_ = false;
}

std::optional<std::string> GuardedIndex::empty() {
  const std::lock_guard lock(writing_);
  try {
    folder_.create_index_file();
    DiskIndex(folder_.index_file(), Database::Mode::write).reset();
    return std::nullopt;
  } catch (const std::runtime_error& failure) {
    return failure.what();
  }
}

std::optional<std::string> GuardedIndex::open_first(bool as_damaged) {
  const std::lock_guard lock(writing_);
  try {
    folder_.create_index_file();
    DiskIndex index(folder_.index_file(), Database::Mode::write);
    bool good = false;
    try {
      if (!as_damaged) index.prepare();
      good = !as_damaged && index.has_version();
    } catch (const SqliteError& error) {
      if (!error.is_damage()) throw;
    }
    if (!good) {
      index.reset();
      ++emptied_;
    }
    return std::nullopt;
  } catch (const std::runtime_error& failure) {
    return failure.what();
  }
}

std::optional<std::string> GuardedIndex::read(const std::function<void(DiskIndex&)>& use) {
  if (suspect_) return "[DiskTier] the index is damaged";
  const std::lock_guard lock(reading_);
  bool opened = false;
  try {
    open_reader();
    opened = true;
    use(*reader_);
    return std::nullopt;
  } catch (const Error& error) {
    if (opened) throw;
    reader_.reset();
    return error.what();
  } catch (const SqliteError& error) {
    reader_.reset();
    if (error.is_damage() && folder_.is_writable()) suspect_ = true;
    return error.what();
  }
}

std::optional<std::string> GuardedIndex::write(const std::function<void(DiskIndex&)>& use) {
  const std::lock_guard lock(writing_);
  constexpr int kAttempts = 4;  // repaired, found sound, emptied, moved away
  for (int attempt = 0;; ++attempt) {
    bool opened = false;
    try {
      open_writer();
      opened = true;
      use(*writer_);
      return std::nullopt;
    } catch (const Error& error) {
      if (opened) throw;
      writer_.reset();
      return error.what();
    } catch (const SqliteError& error) {
      writer_.reset();
      if (attempt + 1 == kAttempts || !(error.is_damage() || error.is_moved())) return error.what();
      if (error.is_moved()) continue;
      try {
        repair();
      } catch (const std::runtime_error& failure) {
        return failure.what();
      }
    }
  }
}

std::optional<std::string> GuardedIndex::mend() {
  const std::lock_guard lock(writing_);
  try {
    if (suspect_) repair();
    return std::nullopt;
  } catch (const std::runtime_error& failure) {
    return failure.what();
  }
}

}  // namespace reprise::internal
