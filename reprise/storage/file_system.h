// The file operations that can fail in the middle, behind a seam, so that tests can make them fail; and the one way in
// which this project replaces a file.
// Threads: RealFileSystem may be used from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace reprise {

class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // Throws: resource_exhausted when the disk is full, else internal with the system's message.
  virtual void append(std::span<const std::byte> bytes) = 0;
  // Replaces bytes that were appended before. Requires: they lie within the file. Throws: as append.
  virtual void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  // Data is on the device when it returns.
  virtual void sync() = 0;
  virtual void close() = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Creates a new file that nobody else has, in the folder of `target`: with mode 0600 if `target` exists, else 0666
  // less the umask. Returns it and its path. Throws: not_found when that folder is missing.
  virtual std::pair<std::unique_ptr<WritableFile>, std::filesystem::path> create_temporary(
      const std::filesystem::path& target) = 0;
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  virtual void sync_folder(const std::filesystem::path& folder) = 0;
  virtual void remove(const std::filesystem::path& file) noexcept = 0;
};

FileSystem& real_file_system();

struct ReplaceOptions {
  // Called with the finished temporary's path before it is renamed; throws to refuse it.
  std::function<void(const std::filesystem::path&)> verify = {};
  FileSystem* file_system = nullptr;  // null: the real one
};

// Writes a temporary file beside `target` through `write`, syncs it, verifies it, renames it over `target` and syncs
// the folder. Any failure up to the rename removes the temporary and leaves the old file untouched; a failure after it
// (the folder's sync) says that the new file is in place but may not survive a power cut. Of several writers the last
// complete one wins. An existing file's permission bits are kept; a new file gets 0666 less the umask. A symbolic link
// stays: the file it points to is replaced, or made.
// Throws: not_found (the folder is missing), invalid_argument (`target` is a folder or no regular file),
// resource_exhausted (disk full), internal (the system's message), and whatever `write` and `verify` throw.
void replace_file(const std::filesystem::path& target, const std::function<void(WritableFile&)>& write,
                  const ReplaceOptions& options = {});

// The whole file as bytes. Throws: not_found, invalid_argument (a folder), internal.
std::string read_file(const std::filesystem::path& file);

}  // namespace reprise
