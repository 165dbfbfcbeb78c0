// What was computed once, by the tokens it was computed for: prompt caches are cut into blocks and checkpoints, kept in
// memory within one budget with the live ones, and on disk; a prompt gets the longest prefix of it back as a prompt
// cache of its own that shares pages. Threads: one thread, the one that evaluates (the disk tier has its own). Owns:
// the tree and the disk tier.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "reprise/base/clock.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/prefix/prefix_tree.h"
#include "reprise/prefix/tiers/disk_tier.h"
#include "reprise/prefix/tiers/prompt_blocks.h"

namespace reprise {

struct PrefixCacheOptions {
  int block_size = 256;
  std::optional<std::chrono::milliseconds> ttl = {};
  std::optional<DiskTierOptions> disk = {};
  // Of pages (live and cached) and of recurrent state that is stored.
  std::size_t max_bytes = std::size_t{2} << 30;
};

struct PrefixCacheStats {
  PrefixTreeStats tree;
  std::optional<DiskTierStats> disk;
  std::uint64_t fetches = 0, hits = 0;  // hits: at least one token
  std::uint64_t asked_tokens = 0, hit_tokens = 0, disk_hit_tokens = 0;
  std::uint64_t refused = 0;  // entries whose layers were not as long as their key, on the way in or out [X5]
};

struct FetchedPrefix {
  PromptCache cache;  // the form, filled with `length` tokens
  int length = 0;
  std::shared_ptr<PrefixTree::Lease> lease;
};

class PrefixCache {
 public:
  // `form`: an empty paged prompt cache of the model. `space`: its fingerprint and all settings that change what rows
  // hold.
  PrefixCache(PromptCache form, std::string space, std::shared_ptr<PagePool> pool, const PrefixCacheOptions& options,
              const Clock& clock = steady_clock());

  // The longest prefix of `tokens` that is stored under `salt`, but at most all of them less one: that one is computed
  // for its logits. First in memory, then on disk (what is read comes into memory, if it fits). A damaged entry
  // shortens it and is counted. Never throws for what is stored; throws bad_alloc.
  FetchedPrefix fetch(const std::string& salt, std::span<const TokenId> tokens);
  // Its length without looking at the disk; changes nothing.
  int cached_length(const std::string& salt, std::span<const TokenId> tokens) const;

  // Keeps `cache`, which holds exactly `tokens` and is evaluated, and moves the lease on; with `checkpoint` also its
  // recurrent state, if the model has any and it fits. On disk go blocks that are whole, and with `finished` the last
  // one too; what is there already counts as used then. Returns: tokens of it that are stored now. Never throws for a
  // cache of another length: refused and counted.
  struct StoreOptions {
    bool checkpoint = false;
    bool finished = false;
  };
  int store(const std::string& salt, std::span<const TokenId> tokens, const PromptCache& cache,
            std::shared_ptr<PrefixTree::Lease>* lease, const StoreOptions& options);

  // Pages that anybody holds, stored recurrent state, and what the caller says of the live one.
  std::size_t nbytes() const;
  void set_live_state_nbytes(std::size_t bytes) { live_state_nbytes_ = bytes; }
  // Evicts until nbytes() + bytes ≤ max_bytes; nothing, where that cannot be reached. Returns: whether that is so now.
  bool make_room(std::size_t bytes);
  void expire() { tree_.expire(); }
  // Forgets what is neither pinned nor in use, also on disk, of one salt or of all; on disk nothing of another space.
  void clear(const std::optional<std::string>& salt = {});

  PrefixTree& tree() { return tree_; }
  std::string space_of(const std::string& salt) const;
  void flush();  // of the disk tier
  PrefixCacheStats stats() const;
  const PromptCache& form() const { return form_; }
  const PrefixCacheOptions& options() const { return options_; }

 private:
  using Lease = std::shared_ptr<PrefixTree::Lease>;
  // Brings what is on disk of `tokens` beyond `length` into the tree. Returns: whether anything came.
  bool load(const std::string& space, std::span<const TokenId> tokens, int length, Lease& lease);
  bool load_block(const std::string& space, std::span<const TokenId> tokens, const DiskTier::Found::Piece& piece,
                  Lease& lease);
  bool load_checkpoint(const std::string& space, std::span<const TokenId> tokens, const std::string& file);
  void refuse(const std::string& why);

  PromptCache form_;
  std::string space_;
  std::shared_ptr<PagePool> pool_;
  PrefixCacheOptions options_;
  bool needs_checkpoint_;
  PrefixTree tree_;
  std::unique_ptr<DiskTier> disk_;
  std::size_t live_state_nbytes_ = 0;
  bool evicted_since_flush_ = false;  // what is evicted may still wait to be written
  PrefixCacheStats stats_;
};

}  // namespace reprise
