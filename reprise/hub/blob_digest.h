// The digest that names a file on the hub: SHA-256 of what large-file storage holds, git's blob id (SHA-1 over a header
// and the bytes) of the rest. Private to `hub`.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace reprise::internal {

class BlobDigest {
 public:
  enum class Kind { sha256, git_blob };

  // `size`: bytes of the whole file.
  BlobDigest(Kind kind, std::uint64_t size);
  ~BlobDigest();
  BlobDigest(BlobDigest&&) noexcept;
  BlobDigest& operator=(BlobDigest&&) noexcept;

  void update(const void* data, std::size_t size_bytes);
  // Returns: lower-case hex digits. The object must not be used afterwards.
  std::string hex_digest();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace reprise::internal
