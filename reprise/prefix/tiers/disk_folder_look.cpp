#include "reprise/prefix/tiers/disk_folder_look.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <system_error>

#include "reprise/base/error.h"
#include "reprise/prefix/tiers/disk_keys.h"
#include "reprise/prefix/tiers/sqlite_database.h"

namespace reprise::internal {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kOthersWrite = 022;

[[noreturn]] void refuse(const std::string& what, const fs::path& got) {
  throw Error(ErrorCode::invalid_argument, "[DiskTier] " + what + ", but got " + got.string());
}

// The mode that an entry of the folder has; none: it may not be there at all.
std::optional<mode_t> kind_of(std::string_view name) {
  if (name == kFilesName) return S_IFDIR;
  if (name == kOpeningLockName || name == kUsersLockName) return S_IFREG;
  if (!name.starts_with(kIndexName)) return std::nullopt;
  name.remove_prefix(std::string_view(kIndexName).size());
  const bool is_known = name.empty() || name == "-wal" || name == "-shm" || name == "-journal";
  return is_known ? std::optional<mode_t>(S_IFREG) : std::nullopt;
}

std::string start_of(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return {};
  std::string text(kMark.size() + 1, '\0');
  const ssize_t size = ::read(descriptor, text.data(), text.size());
  ::close(descriptor);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return text;
}

// Whether it is sound, and another program's. Asked through SQLite: to close a file that is open elsewhere in this
// process would release its locks.
bool is_anothers_database(const fs::path& index) {
  constexpr std::chrono::milliseconds kPatience{1000};
  for (const Database::Mode mode : {Database::Mode::read, Database::Mode::read_still}) {
    try {
      Database database(index, mode, kPatience);
      const std::int64_t application = database.number("PRAGMA application_id");
      if (application == kApplicationId) return false;
      return application != 0 || database.number("SELECT count(*) FROM sqlite_schema") != 0;
    } catch (const SqliteError& error) {
      if (error.is_damage()) return false;
    }
  }
  return false;
}

}  // namespace

bool is_content_name(std::string_view name) {
  const std::string_view suffix = kFileSuffix;
  return name.ends_with(suffix) && is_hash(name.substr(0, name.size() - suffix.size()));
}

bool is_unfinished_name(std::string_view name) {
  constexpr std::string_view kEnd = ".tmp";
  constexpr std::size_t kDigits = 16;
  if (!name.starts_with(".") || !name.ends_with(kEnd) || name.size() < kEnd.size() + kDigits + 2) return false;
  name = name.substr(1, name.size() - 1 - kEnd.size());
  const std::string_view digits = name.substr(name.size() - kDigits);
  name.remove_suffix(kDigits);
  return digits.find_first_not_of("0123456789abcdef") == std::string_view::npos && name.ends_with(".") &&
         is_content_name(name.substr(0, name.size() - 1));
}

FolderLook look_at(const fs::path& folder) {
  struct stat whole {};
  if (::stat(folder.c_str(), &whole) != 0) {
    const std::string why = std::generic_category().message(errno);
    throw Error(ErrorCode::internal, "[DiskTier] cannot inspect the folder: " + why + ", but got " + folder.string());
  }
  // What a stranger's index says about a file can be made to fit it.
  if (whole.st_uid != ::geteuid() && ::geteuid() != 0) refuse("needs a folder of its own user", folder);
  FolderLook look{.is_exposed = (whole.st_mode & kOthersWrite) != 0};
  std::error_code failure;
  std::optional<fs::path> in_the_way;  // unless the mark is there
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end; entry.increment(failure)) {
    const fs::path& path = entry->path();
    const std::string name = path.filename().string();
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) continue;  // somebody else has just removed it
    const std::optional<mode_t> kind = kind_of(name);
    if (!kind) refuse("needs a folder of its own, or an empty one", path);
    if ((status.st_mode & S_IFMT) != *kind) refuse("needs a folder of its own, without links and the like", path);
    if (status.st_uid != ::geteuid() && status.st_uid != whole.st_uid) {
      refuse("needs a folder of its own, with nothing of another user", path);
    }
    look.is_exposed = look.is_exposed || (status.st_mode & kOthersWrite) != 0;
    const std::size_t most = name == kOpeningLockName ? kMark.size() : 0;
    const bool is_lock = name == kOpeningLockName || name == kUsersLockName;
    if (!is_lock || static_cast<std::size_t>(status.st_size) > most) in_the_way = path;
  }
  if (failure) {
    throw Error(ErrorCode::internal,
                "[DiskTier] cannot read the folder: " + failure.message() + ", but got " + folder.string());
  }
  // Read after the rest: who makes the folder just now makes the mark first.
  const std::string mark = start_of(folder / kOpeningLockName);
  if (mark != kMark) {
    if (in_the_way) refuse("needs a folder of its own (with its mark in opening.lock), or an empty one", *in_the_way);
    if (!kMark.starts_with(mark)) refuse("needs a folder of its own, or an empty one", folder / kOpeningLockName);
    return {};  // nothing is in it
  }
  for (fs::directory_iterator entry(folder / kFilesName, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    if (!is_content_name(name) && !is_unfinished_name(name)) {
      refuse("needs a folder of its own, with nothing else in it", entry->path());
    }
  }
  const fs::path index = folder / kIndexName;
  if (fs::exists(fs::symlink_status(index, failure)) && is_anothers_database(index)) {
    refuse("needs a folder of its own, with an index of its own", index);
  }
  return look;
}

}  // namespace reprise::internal
