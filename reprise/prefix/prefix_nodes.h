// The nodes of a prefix tree, the order in which they may go, and the counts of them: what PrefixTree makes its rules
// of. A node is a block. It lies in one of two lists, which own it: `held_`, when a pin or a lease counts on it, else
// `free_`, least recently used first. Always:
//  - a hold counts on every node of its path, the root included, so whatever is below a free node is free;
//  - in free_ a node comes before its parent, so the first one is a leaf;
//  - last_used does not fall along free_;
//  - only a node of block_size tokens has children, and no child begins with all tokens of another, so the child that
//    shares most with given tokens is beside the place where they would stand.
// Checkpoints hang at their block, and are found through its parent by their tokens: siblings may begin alike.
// No function recurses: a path may be a million nodes deep. Threads: one at a time. Owns: nodes and their contents.
#pragma once

#include <list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reprise/prefix/prefix_tree.h"

namespace reprise::internal {

using TokenSpan = std::span<const TokenId>;

struct Node;

// The state after all tokens above the block and the first `offset` of its own.
struct Checkpoint {
  Node* block = nullptr;
  int offset = 0;  // 1 … tokens of the block
  mutable StoredRef content;
  mutable std::size_t nbytes = 0;

  TokenSpan tokens() const;  // of the block
};

struct ByTokens {
  using is_transparent = void;
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return less(of(a), of(b));
  }

 private:
  static TokenSpan of(TokenSpan tokens) { return tokens; }
  static TokenSpan of(const Checkpoint& checkpoint) { return checkpoint.tokens(); }
  static TokenSpan of(const Node* node);
  static bool less(TokenSpan a, TokenSpan b);
};

using Children = std::set<Node*, ByTokens>;
using Checkpoints = std::set<Checkpoint, ByTokens>;

// A root is the node of no tokens and no content that a space has.
struct Node {
  std::uint64_t id = 0;
  const std::string* space = nullptr;
  Node* parent = nullptr;
  int begin = 0;
  Tokens tokens;
  StoredRef content;
  std::size_t nbytes = 0;  // as the content said when it came

  Children children;
  Checkpoints below;                               // those of the children
  std::vector<Checkpoints::iterator> checkpoints;  // its own, in the parent's `below`, by offset

  int pins = 0;
  int leases = 0;
  std::uint64_t hits = 0;
  Clock::TimePoint last_used;
  std::list<Node>::iterator place;    // where it is owned; a root is nowhere
  Children::iterator among_siblings;  // in the parent's children

  int end() const { return begin + static_cast<int>(tokens.size()); }
  bool is_root() const { return parent == nullptr; }
  bool is_held() const { return pins + leases > 0; }
};

std::size_t common_prefix(TokenSpan a, TokenSpan b);

class PrefixNodes {
 public:
  explicit PrefixNodes(const Clock& clock) : clock_(clock) {}
  PrefixNodes(const PrefixNodes&) = delete;
  PrefixNodes& operator=(const PrefixNodes&) = delete;

  // Null when nothing is stored there.
  Node* find_root(const std::string& space) const;
  Node& root(const std::string& space);

  // The child that shares most tokens with `tokens`, and how many; null: none shares any. Of equally good ones the
  // first that does not come before them, else the last that does.
  static std::pair<Node*, int> nearest_child(const Node& parent, TokenSpan tokens);
  // The longest checkpoint below `parent` whose tokens `tokens` begins with. Null: none.
  static const Checkpoint* longest_checkpoint(const Node& parent, TokenSpan tokens);
  static const Checkpoint* exact_checkpoint(const Node& parent, TokenSpan tokens);

  // A new node below one that is held. Requires: no child is a prefix of `tokens` or begins with them.
  Node& add(Node& parent, TokenSpan tokens, StoredRef content, std::size_t nbytes);
  // Gives a node a longer content; what else it has stays. Requires: held; `tokens` begins with the node's.
  void extend(Node& node, TokenSpan tokens, StoredRef content, std::size_t nbytes);
  // Requires: `block` is held; there is none of these tokens.
  void add_checkpoint(Node& block, int offset, StoredRef content, std::size_t nbytes);
  void replace_checkpoint(const Checkpoint& checkpoint, StoredRef content, std::size_t nbytes);

  // What a pin or a lease (`count`) does to the nodes from `node` up to, and without, `above` (null: root included).
  // The last release makes them the most recently used, a parent more so than its child; a root without children goes.
  void hold(Node& node, int Node::*count, const Node* above = nullptr);
  void release(Node& node, int Node::*count);

  // The least recently used leaf. Null when all are held.
  Node* oldest() { return free_.empty() ? nullptr : &free_.front(); }
  // Requires: a free leaf. Returns: bytes.
  std::size_t remove(Node& leaf);
  // Requires: a checkpoint of a free block.
  std::size_t remove_first_checkpoint(Node& block);
  // All that are free. Requires: the space, if one is named, is not that of a node.
  std::size_t remove_free(const std::string* space);

  void for_each(const std::function<void(const PrefixTree::NodeView&)>& visit) const;

  PrefixTreeStats& stats() { return stats_; }
  Clock::TimePoint now() const { return clock_.now(); }

 private:
  void drop_if_empty(Node& root);

  const Clock& clock_;
  std::map<std::string, Node, std::less<>> roots_;
  std::list<Node> held_;
  std::list<Node> free_;
  std::uint64_t last_id_ = 0;
  PrefixTreeStats stats_;
};

}  // namespace reprise::internal
