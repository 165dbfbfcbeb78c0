#include "reprise/prefix/tiers/disk_keys.h"

#include <algorithm>
#include <cstdint>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"

namespace reprise::internal {
namespace {

std::string chain(const std::string& space, std::span<const TokenId> whole_blocks, std::size_t block_size) {
  std::string hash = space;
  for (std::size_t at = 0; at < whole_blocks.size(); at += block_size) {
    hash = chained_hash(EntryKind::block, hash, token_bytes(whole_blocks.subspan(at, block_size)));
  }
  return hash;
}

EntryKey key_of(EntryKind kind, const std::string& space, std::span<const TokenId> tokens, std::size_t begin,
                std::size_t block_size) {
  EntryKey key;
  key.kind = kind;
  key.space = space_hash(space);
  key.parent = chain(key.space, tokens.first(begin), block_size);
  key.tokens = token_bytes(tokens.subspan(begin));
  key.hash = chained_hash(kind, key.parent, key.tokens);
  key.begin = static_cast<int>(begin);
  key.end = static_cast<int>(tokens.size());
  return key;
}

}  // namespace

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

EntryKey block_key(const std::string& space, std::span<const TokenId> tokens, int begin, int block_size) {
  const auto size = static_cast<int>(tokens.size());
  if (begin < 0 || begin % block_size != 0 || begin >= size || size - begin > block_size) {
    throw Error(ErrorCode::invalid_argument, "[DiskTier::write_block] a block is [begin, tokens), at most " +
                                                 std::to_string(block_size) + " from a multiple of it on, but got [" +
                                                 std::to_string(begin) + ", " + std::to_string(size) + ")");
  }
  return key_of(EntryKind::block, space, tokens, static_cast<std::size_t>(begin), static_cast<std::size_t>(block_size));
}

EntryKey checkpoint_key(const std::string& space, std::span<const TokenId> tokens, int block_size) {
  if (tokens.empty()) {
    throw Error(ErrorCode::invalid_argument, "[DiskTier::write_checkpoint] needs a token, but got none");
  }
  const auto step = static_cast<std::size_t>(block_size);
  return key_of(EntryKind::checkpoint, space, tokens, tokens.size() / step * step, step);
}

bool is_hash(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace reprise::internal
