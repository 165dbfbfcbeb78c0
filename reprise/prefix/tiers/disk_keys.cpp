#include "reprise/prefix/tiers/disk_keys.h"

#include <algorithm>
#include <cstdint>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"

namespace reprise::internal {
std::string token_bytes(std::span<const TokenId> tokens) {
  std::string bytes;
  bytes.reserve(tokens.size() * kTokenBytes);
  for (const TokenId token : tokens) {
    const auto value = static_cast<std::uint32_t>(token);
    for (const unsigned shift : {24U, 16U, 8U, 0U}) bytes += static_cast<char>((value >> shift) & 0xffU);
  }
  return bytes;
}

int common_tokens(std::string_view a, std::string_view b) {
  const std::size_t size = std::min(a.size(), b.size());
  const auto differ = std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(size), b.begin()).first;
  return static_cast<int>(static_cast<std::size_t>(differ - a.begin()) / kTokenBytes);
}

std::string space_hash(const std::string& space) {
  return sha256_hex("reprise disk tier " + std::to_string(kDiskFormat) + "\n" + space);
}

std::string chained_hash(EntryKind kind, std::string_view parent, std::string_view tokens) {
  Sha256 hash;
  hash.update(kind == EntryKind::block ? "block " : "checkpoint ");
  hash.update(parent);
  hash.update(tokens);
  return hash.hex_digest();
}

KeyChain::KeyChain(const std::string& space, std::span<const TokenId> tokens, int block_size)
    : tokens_(tokens), block_size_(static_cast<std::size_t>(block_size)), hashes_{space_hash(space)} {}

EntryKey KeyChain::key_of(EntryKind kind, std::size_t begin, std::size_t end) {
  while (hashes_.size() <= begin / block_size_) {
    const auto block = tokens_.subspan((hashes_.size() - 1) * block_size_, block_size_);
    hashes_.push_back(chained_hash(EntryKind::block, hashes_.back(), token_bytes(block)));
  }
  EntryKey key;
  key.kind = kind;
  key.space = hashes_.front();
  key.parent = hashes_[begin / block_size_];
  key.tokens = token_bytes(tokens_.subspan(begin, end - begin));
  key.hash = chained_hash(kind, key.parent, key.tokens);
  key.begin = static_cast<int>(begin);
  key.end = static_cast<int>(end);
  return key;
}

EntryKey KeyChain::block(int begin, int end) {
  const auto at = static_cast<std::size_t>(begin);
  const auto size = static_cast<int>(tokens_.size());
  if (begin < 0 || at % block_size_ != 0 || begin >= end || end > size ||
      static_cast<std::size_t>(end) - at > block_size_) {
    throw Error(ErrorCode::invalid_argument, "[DiskTier::write_block] a block is [begin, end), at most " +
                                                 std::to_string(block_size_) + " from a multiple of it on, but got [" +
                                                 std::to_string(begin) + ", " + std::to_string(end) + ") of " +
                                                 std::to_string(size) + " tokens");
  }
  return key_of(EntryKind::block, at, static_cast<std::size_t>(end));
}

EntryKey KeyChain::checkpoint() {
  if (tokens_.empty()) {
    throw Error(ErrorCode::invalid_argument, "[DiskTier::write_checkpoint] needs a token, but got none");
  }
  return key_of(EntryKind::checkpoint, tokens_.size() / block_size_ * block_size_, tokens_.size());
}

bool is_hash(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace reprise::internal
