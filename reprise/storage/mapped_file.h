// A file opened for reading, and one mapped into memory. Private to storage.
// Threads: immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace reprise::internal {

class InputFile {
 public:
  // Throws: not_found, invalid_argument (a folder), internal. `function` opens the message.
  InputFile(const std::filesystem::path& file, const char* function);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::uint64_t size_bytes() const { return size_bytes_; }
  int descriptor() const { return descriptor_; }

  // Fills `out` from byte `offset` on. Throws: corrupt_data when the file ends first, internal.
  void read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  int descriptor_ = -1;
  std::uint64_t size_bytes_ = 0;
  std::filesystem::path path_;
  const char* function_;
};

// A private copy-on-write mapping: a stray write through it never reaches the file.
// A file that shrinks while it is mapped kills its reader (SIGBUS): only files that are replaced, never rewritten in
// place, may be mapped.
class MappedFile {
 public:
  static std::shared_ptr<MappedFile> open(const std::filesystem::path& file, const char* function);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }

  // Gives back the memory of the pages wholly within: they are read from the file again when they are looked at.
  // Requires: nobody has written to them.
  void release(std::span<const std::byte> range) const;

 private:
  MappedFile(std::byte* data, std::size_t size) : data_(data), size_(size) {}

  std::byte* data_;
  std::size_t size_;
};

}  // namespace reprise::internal
