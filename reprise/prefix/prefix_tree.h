// Which token prefixes are stored, and what is kept under them: a radix tree over token ids whose edges are cut every
// block_size tokens. It never looks inside what it stores. A block holds something per token, so that any number of its
// first tokens can be used; a checkpoint holds the state after exactly its tokens. Least recently used leaves go first;
// what is pinned, or leased to a running sequence, stays. Used is what is matched, stored or given free: a path then
// counts as used from its end to its beginning, so that of one path the end goes first.
// Radix attention: Zheng et al., "SGLang", https://arxiv.org/abs/2312.07104.
// Costs: linear in the tokens walked, a logarithm of the branches at each block; evicting one is constant. No function
// recurses, however deep the tree is.
// Threads: one object belongs to one thread at a time; leases too. Owns: the nodes; contents are shared with who asks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reprise/base/clock.h"
#include "reprise/base/tokens.h"

namespace reprise {

// What somebody keeps in the tree.
class Stored {
 public:
  virtual ~Stored() = default;
  virtual std::size_t nbytes() const = 0;  // must not change
};
using StoredRef = std::shared_ptr<const Stored>;

struct PrefixTreeOptions {
  int block_size = 256;
  // Of contents, checkpoints included; never exceeded. A content that finds no room beside what is pinned or leased,
  // and beside the path that it continues, is not stored, and nothing is evicted for it.
  std::size_t max_bytes = std::numeric_limits<std::size_t>::max();
  std::optional<std::chrono::milliseconds> ttl = {};  // of what nobody uses; none: for ever
};

struct PrefixTreeStats {
  std::size_t blocks = 0, checkpoints = 0, tokens = 0;
  std::size_t nbytes = 0;  // of all contents
  std::size_t checkpoint_nbytes = 0;
  std::size_t pinned_nbytes = 0;                              // pinned or leased
  std::uint64_t evicted_blocks = 0, evicted_checkpoints = 0;  // for room, and by evict_one
  std::uint64_t expired_blocks = 0;
};

class PrefixTree {
 public:
  // Keeps a path, and the checkpoints at it, from being removed as long as it lives. May outlive the tree.
  class Lease;

  struct Block {
    int begin = 0;
    int end = 0;  // of what can be used: ≤ begin + block_size
    StoredRef content;
  };

  struct Match {
    int length = 0;                // tokens that need not be computed
    std::vector<Block> blocks;     // of [0, length), in order
    StoredRef checkpoint;          // of exactly `length` tokens, where one was asked for
    std::shared_ptr<Lease> lease;  // on the blocks; null when there are none
  };

  // Throws: invalid_argument for block_size < 1 or a negative ttl. `clock` must outlive the tree and never go back.
  explicit PrefixTree(const PrefixTreeOptions& options = {}, const Clock& clock = steady_clock());
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest stored prefix of `tokens` in `space` (model, settings and salt: prefixes of different spaces never
  // meet); with `needs_checkpoint` the longest at which there is one. What it is made of becomes the most recently
  // used.
  Match match(const std::string& space, std::span<const TokenId> tokens, bool needs_checkpoint);
  // Its length; changes nothing.
  int matched_length(const std::string& space, std::span<const TokenId> tokens, bool needs_checkpoint) const;

  // Stores the blocks of `tokens` that are not there; `make(begin, end)` gives the content of a block, or null: then it
  // and those after it are not stored, as when there is no room. A last block of fewer tokens is stored unless a block
  // begins with them; a longer one that begins with it takes its place, with its checkpoints, pins and leases.
  // `lease`, if given, moves on to the end of what is stored (null inside: becomes one). Returns: tokens stored now, as
  // matched_length would. What `make` throws passes; the blocks before it are stored and `lease` is where it was.
  // `make` may evict, and must not insert.
  using MakeContent = std::function<StoredRef(int begin, int end)>;
  int insert(const std::string& space, std::span<const TokenId> tokens, const MakeContent& make,
             std::shared_ptr<Lease>* lease = nullptr);
  // Keeps `content` as the state after exactly `tokens`, in place of an earlier one. Returns: false, and nothing is
  // changed, when their blocks are not stored that far, when there are no tokens, or when there is no room.
  // Throws: invalid_argument for null.
  bool insert_checkpoint(const std::string& space, std::span<const TokenId> tokens, StoredRef content);

  // Removes the least recently used leaf; but first, one each time and from its beginning, the checkpoints in it that
  // are not its last. Returns: the bytes that went; none when nothing may go.
  std::optional<std::size_t> evict_one();
  // Removes what has not been used for the ttl, which other functions do not look at. Returns: bytes.
  std::size_t expire();
  // Removes everything that is neither pinned nor leased, in one space or in all. Returns: bytes.
  std::size_t clear(const std::optional<std::string>& space = {});

  // Keeps what is stored of `tokens` now. Returns: so many tokens. Every pin is its own: it ends by one unpin of the
  // same tokens, the latest first.
  int pin(const std::string& space, std::span<const TokenId> tokens);
  // Returns: false when these tokens were not pinned.
  bool unpin(const std::string& space, std::span<const TokenId> tokens);

  const PrefixTreeStats& stats() const;

  // Every node, parents before children, those of one space together: for people who want to see it. `visit` must not
  // change the tree.
  struct NodeView {
    std::uint64_t id = 0;
    std::uint64_t parent = 0;  // 0: a root
    const std::string* space = nullptr;
    int begin = 0;
    std::span<const TokenId> tokens;
    std::size_t nbytes = 0;  // checkpoints included
    std::size_t checkpoints = 0;
    int pins = 0;    // whose path it is on
    int leases = 0;  // likewise
    std::uint64_t hits = 0;
    Clock::TimePoint last_used;
  };
  void for_each(const std::function<void(const NodeView&)>& visit) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace reprise
