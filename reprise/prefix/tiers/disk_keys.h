// Under what name the disk tier's index keeps things: the chain of hashes of the whole blocks before, and the tokens
// behind it. Private to tiers.
// Threads: values and free functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reprise/base/tokens.h"

namespace reprise::internal {

// Of the folder's layout, the index and what files say about themselves. Another number is another folder.
inline constexpr int kDiskFormat = 2;

// Of the index, as SQLite's header has it.
inline constexpr int kApplicationId = 0x72707264;

enum class EntryKind : int { block = 0, checkpoint = 1 };

// Tokens as bytes that sort as they do: four each, the most significant first.
std::string token_bytes(std::span<const TokenId> tokens);
inline constexpr std::size_t kTokenBytes = 4;
// Of both, at the front.
int common_tokens(std::string_view a, std::string_view b);

// All hashes are 64 hex digits. A prefix without tokens has the hash of its space.
std::string space_hash(const std::string& space);
// Of what is kept for `tokens` behind what has the hash `parent`.
std::string chained_hash(EntryKind kind, std::string_view parent, std::string_view tokens);

struct EntryKey {
  EntryKind kind = EntryKind::block;
  std::string space;   // hash
  std::string parent;  // hash of the whole blocks before it
  std::string tokens;  // bytes of those behind them: 1 to block_size of a block, 0 to block_size - 1 of a checkpoint
  std::string hash;    // of kind, parent and tokens
  int begin = 0;       // position of the first of them
  int end = 0;
};

// The keys of what one prompt consists of: each whole block is hashed once, however many keys are asked for.
class KeyChain {
 public:
  // `tokens` outlive it.
  KeyChain(const std::string& space, std::span<const TokenId> tokens, int block_size);
  // Of the block [begin, end). Throws: invalid_argument for a begin that no block has, or too many tokens.
  EntryKey block(int begin, int end);
  // Of the state after all tokens. Throws: invalid_argument without any.
  EntryKey checkpoint();

 private:
  EntryKey key_of(EntryKind kind, std::size_t begin, std::size_t end);

  std::span<const TokenId> tokens_;
  std::size_t block_size_;
  std::vector<std::string> hashes_;  // of the first 0, 1, … whole blocks
};

bool is_hash(std::string_view text);

}  // namespace reprise::internal
