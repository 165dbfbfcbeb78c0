#include "reprise/prefix/tiers/disk_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/prefix/tiers/disk_folder_look.h"

namespace reprise::internal {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::minutes kUnfinished{10};
constexpr std::chrono::seconds kPatience{5};

std::string system_text(int errno_value) { return std::generic_category().message(errno_value); }

[[noreturn]] void fail(ErrorCode code, const std::string& what, const fs::path& folder) {
  throw Error(code, "[DiskTier] " + what + ", but got " + folder.string());
}

// Nobody else may read what comes to be written, whatever the umask.
class PrivateFileSystem final : public FileSystem {
 public:
  explicit PrivateFileSystem(FileSystem& inner) : inner_(inner) {}

  std::pair<std::unique_ptr<WritableFile>, fs::path> create_temporary(const fs::path& target) override {
    auto made = inner_.create_temporary(target);
    if (::chmod(made.second.c_str(), 0600) != 0) {
      const int failure = errno;
      inner_.remove(made.second);
      throw Error(ErrorCode::internal,
                  "[DiskTier] cannot restrict " + made.second.string() + ": " + system_text(failure));
    }
    return made;
  }
  void rename(const fs::path& from, const fs::path& to) override { inner_.rename(from, to); }
  void sync_folder(const fs::path& folder) override { inner_.sync_folder(folder); }
  void remove(const fs::path& file) noexcept override { inner_.remove(file); }

 private:
  FileSystem& inner_;
};

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

void take_from_others(const fs::path& path, const fs::path& folder) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || (status.st_mode & 077) == 0) return;
  if (::chmod(path.c_str(), status.st_mode & 0700) == 0 || (status.st_mode & 022) == 0) return;
  fail(ErrorCode::invalid_argument, "needs a folder that others cannot write", folder);
}

// Synced: the rest of the folder is not taken for ours without it.
bool write_mark(int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return false;
  if (static_cast<std::size_t>(status.st_size) == kMark.size()) return true;
  return ::pwrite(descriptor, kMark.data(), kMark.size(), 0) == static_cast<ssize_t>(kMark.size()) &&
         ::fsync(descriptor) == 0;
}

bool lock(int descriptor, int how) { return descriptor >= 0 && ::flock(descriptor, how | LOCK_NB) == 0; }

}  // namespace

DiskFolder::DiskFolder(const fs::path& folder, FileSystem& file_system) : folder_(folder), file_system_(file_system) {
  make();
  if (!exposed_) restrict_permissions();
  const auto open_lock = [&](const char* name) {
    const int descriptor = ::open((folder_ / name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0 && why_not_.empty()) why_not_ = system_text(errno);
    return descriptor;
  };
  opening_lock_ = open_lock(kOpeningLockName);
  if (why_not_.empty() && !write_mark(opening_lock_)) why_not_ = system_text(errno);
  users_lock_ = open_lock(kUsersLockName);
  if (why_not_.empty() && ::mkdir((folder_ / kFilesName).c_str(), 0700) != 0 && errno != EEXIST) {
    why_not_ = system_text(errno);
  }
  if (why_not_.empty() && ::access((folder_ / kFilesName).c_str(), W_OK | X_OK) != 0) why_not_ = system_text(errno);
}

DiskFolder::~DiskFolder() {
  for (const int descriptor : {opening_lock_, users_lock_}) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

void DiskFolder::make() {
  if (folder_.empty()) fail(ErrorCode::invalid_argument, "needs a folder", "\"\"");
  std::error_code failure;
  if (const fs::file_status status = fs::status(folder_, failure); fs::exists(status)) {
    if (!fs::is_directory(status)) fail(ErrorCode::invalid_argument, "needs a folder", folder_);
    exposed_ = look_at(folder_).is_exposed;
    return;
  }
  if (folder_.has_parent_path()) fs::create_directories(folder_.parent_path(), failure);
  if (::mkdir(folder_.c_str(), 0700) == 0) return;
  if (errno != EEXIST) fail(ErrorCode::internal, "cannot make the folder: " + system_text(errno), folder_);
  exposed_ = look_at(folder_).is_exposed;  // somebody else was faster
}

void DiskFolder::restrict_permissions() {
  take_from_others(folder_, folder_);
  for (const char* name : {kFilesName, kIndexName, "index.sqlite-wal", "index.sqlite-shm"}) {
    take_from_others(folder_ / name, folder_);
  }
}

fs::path DiskFolder::index_file() const { return folder_ / kIndexName; }

void DiskFolder::create_index_file() const {
  // Never opened when it exists: closing it would release the locks that SQLite holds in this process.
  const int descriptor = ::open(index_file().c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor >= 0) {
    ::close(descriptor);
  } else if (errno != EEXIST) {
    fail(ErrorCode::internal, "cannot make the index: " + system_text(errno), folder_);
  }
}

DiskFolder::Opening::Opening(DiskFolder& folder) : folder_(folder) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!lock(folder_.opening_lock_, LOCK_EX) && errno == EWOULDBLOCK && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  alone_ = lock(folder_.users_lock_, LOCK_EX);
}

DiskFolder::Opening::~Opening() {
  lock(folder_.users_lock_, LOCK_SH);
  lock(folder_.opening_lock_, LOCK_UN);
}

fs::path DiskFolder::path_of(const std::string& name) const { return folder_ / kFilesName / (name + kFileSuffix); }

void DiskFolder::write(const std::string& name, const std::string& bytes) {
  const fs::path file = path_of(name);
  // replace_file follows links, and keeps the permissions of what it replaces.
  struct stat status {};
  if (::lstat(file.c_str(), &status) == 0 && (!S_ISREG(status.st_mode) || (status.st_mode & 077) != 0)) {
    file_system_.remove(file);
  }
  PrivateFileSystem files(file_system_);
  ReplaceOptions options;
  options.file_system = &files;
  replace_file(
      file, [&](WritableFile& output) { output.append(std::as_bytes(std::span(bytes))); }, options);
}

bool DiskFolder::has(const std::string& name, std::uint64_t nbytes) const {
  struct stat status {};
  return ::lstat(path_of(name).c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         static_cast<std::uint64_t>(status.st_size) == nbytes;
}

DiskFolder::Read DiskFolder::read(const std::string& name, std::uint64_t nbytes) const {
  Read result;
  // Neither a link out of the folder, nor a pipe that never ends.
  const Descriptor file(::open(path_of(name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.get() < 0) {
    result.missing = errno == ENOENT || errno == ENOTDIR;
    result.damaged = errno == ELOOP;
    return result;
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return result;
  if (!S_ISREG(status.st_mode) || static_cast<std::uint64_t>(status.st_size) != nbytes) {
    result.damaged = true;
    return result;
  }
  std::string bytes(nbytes, '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t count =
        ::read(file.get(), bytes.data() + filled, std::min<std::size_t>(bytes.size() - filled, 1U << 30U));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return result;
    if (count == 0) break;
    filled += static_cast<std::size_t>(count);
  }
  if (filled == bytes.size() && sha256_hex(bytes) == name) {
    result.bytes = std::move(bytes);
  } else {
    result.damaged = true;
  }
  return result;
}

void DiskFolder::remove(const std::string& name) { file_system_.remove(path_of(name)); }

std::vector<std::string> DiskFolder::names(bool alone) {
  std::vector<std::string> result;
  std::error_code failure;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator entry(folder_ / kFilesName, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string file = entry->path().filename().string();
    if (is_content_name(file)) result.push_back(entry->path().stem().string());
    if (!is_unfinished_name(file)) continue;
    std::error_code gone;
    const fs::file_time_type written = fs::last_write_time(entry->path(), gone);
    if (alone || (!gone && now - written > kUnfinished)) file_system_.remove(entry->path());
  }
  return result;
}

}  // namespace reprise::internal
