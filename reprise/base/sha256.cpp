#include "reprise/base/sha256.h"

#include <openssl/evp.h>

#include <array>

#include "reprise/base/error.h"

namespace reprise {
namespace {

void require(bool ok, const char* step) {
  if (!ok) throw Error(ErrorCode::internal, std::string("[Sha256] OpenSSL failed in ") + step);
}

}  // namespace

struct Sha256::Context {
  EVP_MD_CTX* handle = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(handle); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  require(context_->handle != nullptr && EVP_DigestInit_ex(context_->handle, EVP_sha256(), nullptr) == 1, "init");
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* data, std::size_t size_bytes) {
  require(EVP_DigestUpdate(context_->handle, data, size_bytes) == 1, "update");
}

std::string Sha256::hex_digest() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  require(EVP_DigestFinal_ex(context_->handle, digest.data(), &size) == 1, "final");
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * size);
  for (unsigned int i = 0; i < size; ++i) {
    hex += kDigits[digest[i] >> 4];
    hex += kDigits[digest[i] & 15];
  }
  return hex;
}

std::string sha256_hex(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex_digest();
}

}  // namespace reprise
