// Prompt caches kept for reuse under the tokens that they hold, bounded in number and bytes: mlx-lm's class of that
// name. A hit gives a private fork, so the stored entry stays as it is and its rows are not copied.
// An entry has been evaluated and every layer that knows a position is at the length of its key, on the way in and on
// the way out.
// Threads: one owner thread, no lock. A cache may come from another thread if it was evaluated there
// (PromptCache::eval), and what fetch_nearest_cache returns may go to another one. Owns: the entries.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/prompt_trie.h"

namespace reprise {

// What the last tokens of an entry are; the order is that of eviction.
enum class CacheType { assistant, user, system };

struct FetchedPromptCache {
  std::optional<PromptCache> cache;  // none: nothing stored helps
  Tokens remaining;                  // what is still to be processed: at least one token, unless none was asked for
};

struct CacheTypeStats {
  std::size_t sequences = 0;
  std::size_t bytes = 0;
};

class LRUPromptCache {
 public:
  static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

  explicit LRUPromptCache(std::size_t max_size = 10, std::size_t max_bytes = kUnlimited)
      : max_size_(max_size), max_bytes_(max_bytes) {}

  // The entry that leaves the fewest tokens: of the tokens themselves or one that goes on beyond what they share with
  // it, if it can be trimmed to that (can_trim_prompt_cache), else the longest stored prefix. The entry becomes the
  // most recently used of its type. Throws: failed_precondition when the entry is not as long as its key.
  FetchedPromptCache fetch_nearest_cache(const std::string& model, std::span<const TokenId> tokens);

  // Stores a cache that holds exactly these tokens, in place of an entry of the same key, evaluates it, and removes
  // the entries of proper prefixes that it can be trimmed to. Then entries are evicted until both limits hold. One that
  // alone exceeds a limit is not stored and evicts nothing.
  // Returns: the entry is stored now. Throws: failed_precondition, with nothing changed, when a layer is not at
  // position tokens.size() or broken; what evaluation throws.
  bool insert_cache(const std::string& model, std::span<const TokenId> tokens, PromptCache cache,
                    CacheType type = CacheType::assistant);

  // Evicts until there are at most this many entries and bytes.
  void trim_to(std::optional<std::size_t> sequences, std::optional<std::size_t> bytes = {});

  std::size_t size() const;
  // Sum of the entries' prompt_cache_nbytes.
  std::size_t nbytes() const;
  std::map<CacheType, CacheTypeStats> stats_by_type() const;

 private:
  struct Key {
    std::string model;
    Tokens tokens;
  };
  using Order = std::list<Key>;  // least recently used first

  struct Entry {
    PromptCache cache;
    std::size_t nbytes;
    CacheType type;
    Order::iterator place;  // in the list of its type
  };

  struct Type {
    Order order;
    std::size_t nbytes = 0;
  };

  Type& of(CacheType type) { return types_[static_cast<std::size_t>(type)]; }
  FetchedPromptCache hit(Entry& entry, std::span<const TokenId> tokens, std::size_t reused);
  // The books, not the trie.
  void forget(const Entry& entry);
  void evict_one();

  std::size_t max_size_;
  std::size_t max_bytes_;
  PromptTrie<Entry> trie_;
  std::array<Type, 3> types_;
};

}  // namespace reprise
