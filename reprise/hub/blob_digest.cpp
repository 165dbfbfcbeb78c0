#include "reprise/hub/blob_digest.h"

#include <openssl/evp.h>

#include <string>

#include "reprise/base/error.h"

namespace reprise::internal {

struct BlobDigest::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

BlobDigest::BlobDigest(Kind kind, std::uint64_t size) : context_(std::make_unique<Context>()) {
  const EVP_MD* algorithm = kind == Kind::sha256 ? EVP_sha256() : EVP_sha1();
  if (context_->evp == nullptr || EVP_DigestInit_ex(context_->evp, algorithm, nullptr) != 1) {
    throw Error(ErrorCode::internal,
                "[BlobDigest] OpenSSL has no " + std::string(kind == Kind::sha256 ? "SHA-256" : "SHA-1"));
  }
  if (kind == Kind::git_blob) {
    const std::string header = "blob " + std::to_string(size);
    update(header.c_str(), header.size() + 1);  // with its closing zero
  }
}

BlobDigest::~BlobDigest() = default;
BlobDigest::BlobDigest(BlobDigest&&) noexcept = default;
BlobDigest& BlobDigest::operator=(BlobDigest&&) noexcept = default;

void BlobDigest::update(const void* data, std::size_t size_bytes) {
  if (EVP_DigestUpdate(context_->evp, data, size_bytes) != 1) {
    throw Error(ErrorCode::internal, "[BlobDigest] OpenSSL could not go on");
  }
}

std::string BlobDigest::hex_digest() {
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(context_->evp, bytes, &size) != 1) {
    throw Error(ErrorCode::internal, "[BlobDigest] OpenSSL could not finish");
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    hex += kDigits[bytes[i] >> 4];
    hex += kDigits[bytes[i] & 15];
  }
  return hex;
}

}  // namespace reprise::internal
