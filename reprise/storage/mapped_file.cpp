#include "reprise/storage/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "reprise/storage/system_error.h"

namespace reprise::internal {

InputFile::InputFile(const std::filesystem::path& file, const char* function) : path_(file), function_(function) {
  descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer must not block us
  if (descriptor_ < 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      throw Error(ErrorCode::not_found, std::string("[") + function + "] there is no file " + file.string());
    }
    throw system_error(function, "open", file, errno);
  }
  struct stat status {};
  const int failure = ::fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (failure != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    if (failure != 0) throw system_error(function, "inspect", file, failure);
    throw Error(ErrorCode::invalid_argument,
                std::string("[") + function + "] needs a regular file, but got " + file.string());
  }
  size_bytes_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  constexpr std::size_t kMaxIoBytes = std::size_t{1} << 30;
  while (!out.empty()) {
    const ssize_t count =
        ::pread(descriptor_, out.data(), std::min(out.size(), kMaxIoBytes), static_cast<off_t>(offset));
    if (count < 0) {
      if (errno == EINTR) continue;
      throw system_error(function_, "read", path_, errno);
    }
    if (count == 0) {
      throw Error(ErrorCode::corrupt_data, std::string("[") + function_ + "] " + path_.string() + " ends at byte " +
                                               std::to_string(offset) + ", in the middle of its data");
    }
    offset += static_cast<std::uint64_t>(count);
    out = out.subspan(static_cast<std::size_t>(count));
  }
}

std::shared_ptr<MappedFile> MappedFile::open(const std::filesystem::path& file, const char* function) {
  const InputFile input(file, function);
  const std::uint64_t size = input.size_bytes();
  if (size == 0) return std::shared_ptr<MappedFile>(new MappedFile(nullptr, 0));
  if (size > std::numeric_limits<std::size_t>::max()) throw system_error(function, "map", file, EFBIG);
  int flags = MAP_PRIVATE;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, input.descriptor(), 0);
  if (data == MAP_FAILED) throw system_error(function, "map", file, errno);
  return std::shared_ptr<MappedFile>(new MappedFile(static_cast<std::byte*>(data), size));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void MappedFile::release(std::span<const std::byte> range) const {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (static_cast<std::size_t>(range.data() - data_) + page - 1) / page * page;
  const auto end = static_cast<std::size_t>(range.data() + range.size() - data_) / page * page;
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace reprise::internal
