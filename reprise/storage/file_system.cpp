#include "reprise/storage/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <optional>
#include <random>
#include <system_error>

#include "reprise/storage/system_error.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using internal::system_error;

constexpr std::size_t kMaxIoBytes = std::size_t{1} << 30;  // some systems refuse more in one call
constexpr std::size_t kMaxAppendBytes = std::size_t{4} << 20;

class RealFile final : public WritableFile {
 public:
  RealFile(int descriptor, fs::path path) : descriptor_(descriptor), path_(std::move(path)) {}
  RealFile(const RealFile&) = delete;
  RealFile& operator=(const RealFile&) = delete;
  ~RealFile() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void append(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxAppendBytes));
      if (written < 0) {
        if (errno == EINTR) continue;
        throw system_error("WritableFile::append", "write", path_, errno);
      }
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      size_ += written;
      start_writeback();
    }
  }

  void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (written < 0) {
        if (errno == EINTR) continue;
        throw system_error("WritableFile::overwrite", "write", path_, errno);
      }
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      offset += static_cast<std::uint64_t>(written);
    }
  }

  void sync() override {
#ifdef F_FULLFSYNC
    if (::fcntl(descriptor_, F_FULLFSYNC) == 0) return;
#endif
    if (::fsync(descriptor_) != 0) throw system_error("WritableFile::sync", "sync", path_, errno);
  }

  void close() override {
    const int descriptor = std::exchange(descriptor_, -1);
    if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR) {
      throw system_error("WritableFile::close", "close", path_, errno);
    }
  }

 private:
  // The device begins now, not when sync() is called. A wish: whoever cannot does it then.
  void start_writeback() {
#ifdef SYNC_FILE_RANGE_WRITE
    constexpr off_t kPiece = off_t{4} << 20U;
    if (size_ - given_ < kPiece) return;
    ::sync_file_range(descriptor_, given_, size_ - given_, SYNC_FILE_RANGE_WRITE);
    given_ = size_;
#endif
  }

  int descriptor_;
  const fs::path path_;
  off_t size_ = 0;
  off_t given_ = 0;  // of which the device knows
};

fs::path folder_of(const fs::path& file) {
  const fs::path folder = file.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

// ".<name>.<16 hex digits>.tmp": hidden, and recognisable should a killed process leave one behind.
fs::path temporary_name(const fs::path& target) {
  static std::atomic<std::uint64_t> counter{0};
  std::random_device random;
  std::uint64_t number = (static_cast<std::uint64_t>(random()) << 32) ^ random() ^ counter.fetch_add(1);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string suffix = ".";
  for (int i = 0; i < 16; ++i, number >>= 4) suffix += kDigits[number & 15];
  suffix += ".tmp";
  constexpr std::size_t kMaxNameBytes = 255;
  return folder_of(target) / ("." + target.filename().string().substr(0, kMaxNameBytes - 1 - suffix.size()) + suffix);
}

class RealFileSystem final : public FileSystem {
 public:
  std::pair<std::unique_ptr<WritableFile>, fs::path> create_temporary(const fs::path& target) override {
    struct stat status {};
    const mode_t mode = ::stat(target.c_str(), &status) == 0 ? 0600 : 0666;
    constexpr int kAttempts = 100;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      fs::path path = temporary_name(target);
      const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      if (descriptor >= 0) return {std::make_unique<RealFile>(descriptor, path), path};
      if (errno == EEXIST || errno == EINTR) continue;
      if (errno == ENOENT || errno == ENOTDIR) {
        throw Error(ErrorCode::not_found, "[replace_file] the folder of " + target.string() + " does not exist");
      }
      throw system_error("replace_file", "create a temporary file beside", target, errno);
    }
    throw Error(ErrorCode::internal, "[replace_file] found no free temporary name beside " + target.string());
  }

  void rename(const fs::path& from, const fs::path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) throw system_error("replace_file", "rename a temporary to", to, errno);
  }

  void sync_folder(const fs::path& folder) override {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) throw system_error("replace_file", "open the folder", folder, errno);
    const int failure = ::fsync(descriptor) == 0 ? 0 : errno;
    ::close(descriptor);
    // Some file systems cannot sync a folder and say so with EINVAL: nothing more can be done there.
    if (failure != 0 && failure != EINVAL) throw system_error("replace_file", "sync the folder", folder, failure);
  }

  void remove(const fs::path& file) noexcept override { ::unlink(file.c_str()); }
};

// Where a chain of symbolic links ends; the end itself need not exist.
fs::path follow_links(fs::path path) {
  constexpr int kMaxLinks = 40;
  for (int i = 0; i < kMaxLinks; ++i) {
    std::error_code failure;
    const fs::path next = fs::read_symlink(path, failure);
    if (failure) return path;
    path = next.is_absolute() ? next : folder_of(path) / next;
  }
  throw Error(ErrorCode::invalid_argument, "[replace_file] too many symbolic links from " + path.string());
}

// The permission bits to keep, or none when there is no file yet.
std::optional<mode_t> existing_mode(const fs::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) return std::nullopt;
  if (S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument, "[replace_file] needs a file name, but got the folder " + file.string());
  }
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument, "[replace_file] needs a regular file, but got " + file.string());
  }
  return status.st_mode & 0777;
}

}  // namespace

FileSystem& real_file_system() {
  static RealFileSystem file_system;
  return file_system;
}

void replace_file(const fs::path& target, const std::function<void(WritableFile&)>& write,
                  const ReplaceOptions& options) {
  if (!target.has_filename()) {
    throw Error(ErrorCode::invalid_argument, "[replace_file] needs a file name, but got \"" + target.string() + "\"");
  }
  FileSystem& file_system = options.file_system != nullptr ? *options.file_system : real_file_system();
  const fs::path file = follow_links(target);
  const std::optional<mode_t> mode = existing_mode(file);

  auto [output, temporary] = file_system.create_temporary(file);
  try {
    write(*output);
    output->sync();
    output->close();
    output.reset();
    if (options.verify) options.verify(temporary);
    if (mode && ::chmod(temporary.c_str(), *mode) != 0) {
      throw system_error("replace_file", "set the permissions of", temporary, errno);
    }
    file_system.rename(temporary, file);
  } catch (...) {
    output.reset();
    file_system.remove(temporary);
    throw;
  }
  try {
    file_system.sync_folder(folder_of(file));
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + "; " + file.string() +
                                  " is replaced, but this may not survive a power cut");
  }
}

std::string read_file(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      throw Error(ErrorCode::not_found, "[read_file] there is no file " + file.string());
    }
    throw system_error("read_file", "open", file, errno);
  }
  const RealFile closer(descriptor, file);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw system_error("read_file", "inspect", file, errno);
  if (S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument, "[read_file] needs a file, but got the folder " + file.string());
  }
  // The size is only a hint: the file may grow, or be one of those whose size is not known (a pipe).
  std::string bytes;
  std::size_t filled = 0;
  bytes.resize(static_cast<std::size_t>(std::max<off_t>(status.st_size, 0)) + 1);
  while (true) {
    if (filled == bytes.size()) bytes.resize(2 * bytes.size());
    const ssize_t count = ::read(descriptor, bytes.data() + filled, std::min(bytes.size() - filled, kMaxIoBytes));
    if (count < 0) {
      if (errno == EINTR) continue;
      throw system_error("read_file", "read", file, errno);
    }
    if (count == 0) break;
    filled += static_cast<std::size_t>(count);
  }
  bytes.resize(filled);
  return bytes;
}

}  // namespace reprise
