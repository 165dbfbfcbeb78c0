// What a prefix tree is to do, done by looking at every block: a list of (space, tokens → content). Same names, same
// rules. Threads: one.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/prefix/stored_for_tests.h"

namespace reprise {

class NaivePrefixTree {
 public:
  struct Block {
    int id = 0;
    std::string space;
    int begin = 0;
    Tokens path;  // all tokens up to the block's end
    StoredRef content;
    std::map<int, StoredRef> checkpoints;  // by position
    int pins = 0;
    int leases = 0;
    std::uint64_t hits = 0;
    std::uint64_t order = 0;  // of its last use
    Clock::TimePoint last_used;

    int end() const { return static_cast<int>(path.size()); }
    std::size_t nbytes() const;
  };
  struct Match {
    int length = 0;
    std::vector<PrefixTree::Block> blocks;
    StoredRef checkpoint;
    int last = 0;  // id of the last block
  };

  NaivePrefixTree(const PrefixTreeOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  Match find(const std::string& space, const Tokens& tokens, bool needs_checkpoint) const;
  Match match(const std::string& space, const Tokens& tokens, bool needs_checkpoint);  // its lease: hold_lease(last)
  // `lease`: id of the block that it ends at, 0: none. Lets it go for another one.
  int insert(const std::string& space, const Tokens& tokens, const PrefixTree::MakeContent& make, int* lease);
  bool insert_checkpoint(const std::string& space, const Tokens& tokens, const StoredRef& content);
  std::optional<std::size_t> evict_one();
  std::size_t expire();
  std::size_t clear(const std::optional<std::string>& space);
  int pin(const std::string& space, const Tokens& tokens);
  bool unpin(const std::string& space, const Tokens& tokens);
  void release_lease(int last) { release(last, &Block::leases); }

  PrefixTreeStats stats() const;
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  // The block after `begin` tokens that shares most with the rest of them, and how many.
  std::pair<int, int> nearest(const std::string& space, const Tokens& tokens, int begin) const;
  Block& at(int id);
  const Block& at(int id) const { return const_cast<NaivePrefixTree*>(this)->at(id); }
  std::vector<Block*> path_to(int last);  // from the last one
  void hold(int last, int Block::*count);
  void release(int last, int Block::*count);
  void remove(int id);
  Block* oldest();
  bool make_room(std::size_t nbytes, std::size_t replaced);

  PrefixTreeOptions options_;
  const Clock& clock_;
  std::vector<Block> blocks_;
  std::map<std::pair<std::string, Tokens>, std::vector<int>> pins_;
  std::uint64_t uses_ = 0;
  int last_id_ = 0;
  PrefixTreeStats counted_;  // what went
};

}  // namespace reprise
