// SHA-256 of byte streams (FIPS 180-4, through OpenSSL).
// Threads: one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace reprise {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* data, std::size_t size_bytes);
  void update(std::string_view bytes) { update(bytes.data(), bytes.size()); }

  // Returns: 64 lower-case hex digits. The object must not be used afterwards.
  std::string hex_digest();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

// Returns: 64 lower-case hex digits.
std::string sha256_hex(std::string_view bytes);

}  // namespace reprise
