#include "reprise/prefix/prefix_nodes.h"

#include <algorithm>
#include <iterator>

namespace reprise::internal {

TokenSpan Checkpoint::tokens() const { return TokenSpan(block->tokens).first(static_cast<std::size_t>(offset)); }

TokenSpan ByTokens::of(const Node* node) { return node->tokens; }

bool ByTokens::less(TokenSpan a, TokenSpan b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}

std::size_t common_prefix(TokenSpan a, TokenSpan b) {
  const auto [end, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<std::size_t>(end - a.begin());
}

Node* PrefixNodes::find_root(const std::string& space) const {
  const auto found = roots_.find(space);
  return found == roots_.end() ? nullptr : const_cast<Node*>(&found->second);
}

Node& PrefixNodes::root(const std::string& space) {
  const auto [place, is_new] = roots_.try_emplace(space);
  if (is_new) place->second.space = &place->first;
  return place->second;
}

void PrefixNodes::drop_if_empty(Node& root) {
  if (root.children.empty() && !root.is_held()) roots_.erase(roots_.find(*root.space));
}

std::pair<Node*, int> PrefixNodes::nearest_child(const Node& parent, TokenSpan tokens) {
  const Children& children = parent.children;
  const auto after = children.lower_bound(tokens);
  std::size_t shared = 0;
  Node* nearest = nullptr;
  if (after != children.end()) {
    shared = common_prefix((*after)->tokens, tokens);
    if (shared > 0) nearest = *after;
  }
  if (after != children.begin()) {
    Node* before = *std::prev(after);
    const std::size_t also = common_prefix(before->tokens, tokens);
    if (also > shared) {
      nearest = before;
      shared = also;
    }
  }
  return {nearest, static_cast<int>(shared)};
}

const Checkpoint* PrefixNodes::longest_checkpoint(const Node& parent, TokenSpan tokens) {
  const Checkpoints& all = parent.below;
  while (!tokens.empty()) {
    const auto after = all.upper_bound(tokens);
    if (after == all.begin()) return nullptr;
    const Checkpoint& last = *std::prev(after);
    const std::size_t shared = common_prefix(last.tokens(), tokens);
    if (shared == last.tokens().size()) return &last;
    // Whatever stands between a prefix of `tokens` and `tokens` begins with that prefix: a longer one than `shared`
    // would be one of `last` too.
    tokens = tokens.first(shared);
  }
  return nullptr;
}

const Checkpoint* PrefixNodes::exact_checkpoint(const Node& parent, TokenSpan tokens) {
  const auto found = parent.below.find(tokens);
  return found == parent.below.end() ? nullptr : &*found;
}

Node& PrefixNodes::add(Node& parent, TokenSpan tokens, StoredRef content, std::size_t nbytes) {
  std::list<Node> made(1);
  Node& node = made.front();
  node.space = parent.space;
  node.parent = &parent;
  node.begin = parent.end();
  node.tokens.assign(tokens.begin(), tokens.end());
  node.content = std::move(content);
  node.nbytes = nbytes;
  node.last_used = now();
  node.place = made.begin();
  node.among_siblings = parent.children.insert(&node).first;
  node.id = ++last_id_;
  // A parent comes after its children also while nothing holds the new one.
  free_.splice(free_.end(), made);
  ++stats_.blocks;
  stats_.tokens += tokens.size();
  stats_.nbytes += nbytes;
  return node;
}

void PrefixNodes::extend(Node& node, TokenSpan tokens, StoredRef content, std::size_t nbytes) {
  // In place, siblings stay sorted: none stands between tokens and what begins with them.
  const std::size_t had = node.tokens.size();
  node.tokens.insert(node.tokens.end(), tokens.begin() + static_cast<std::ptrdiff_t>(had), tokens.end());
  stats_.tokens += tokens.size() - had;
  stats_.nbytes += nbytes - node.nbytes;
  stats_.pinned_nbytes += nbytes - node.nbytes;
  node.content = std::move(content);
  node.nbytes = nbytes;
}

void PrefixNodes::add_checkpoint(Node& block, int offset, StoredRef content, std::size_t nbytes) {
  block.checkpoints.reserve(block.checkpoints.size() + 1);
  const auto added = block.parent->below.insert({&block, offset, std::move(content), nbytes}).first;
  const auto later = std::find_if(block.checkpoints.begin(), block.checkpoints.end(),
                                  [offset](const auto& other) { return other->offset > offset; });
  block.checkpoints.insert(later, added);
  ++stats_.checkpoints;
  stats_.nbytes += nbytes;
  stats_.checkpoint_nbytes += nbytes;
  stats_.pinned_nbytes += nbytes;
}

void PrefixNodes::replace_checkpoint(const Checkpoint& checkpoint, StoredRef content, std::size_t nbytes) {
  stats_.nbytes += nbytes - checkpoint.nbytes;
  stats_.checkpoint_nbytes += nbytes - checkpoint.nbytes;
  stats_.pinned_nbytes += nbytes - checkpoint.nbytes;
  checkpoint.content = std::move(content);
  checkpoint.nbytes = nbytes;
}

namespace {

std::size_t all_nbytes(const Node& node) {
  std::size_t nbytes = node.nbytes;
  for (const auto& checkpoint : node.checkpoints) nbytes += checkpoint->nbytes;
  return nbytes;
}

}  // namespace

void PrefixNodes::hold(Node& from, int Node::*count, const Node* above) {
  const Clock::TimePoint time = now();
  for (Node* node = &from; node != above; node = node->parent) {
    if (!node->is_held() && !node->is_root()) {
      held_.splice(held_.end(), free_, node->place);
      stats_.pinned_nbytes += all_nbytes(*node);
    }
    ++(node->*count);
    node->last_used = time;
  }
}

void PrefixNodes::release(Node& from, int Node::*count) {
  const Clock::TimePoint time = now();
  for (Node* node = &from; node != nullptr;) {
    Node* parent = node->parent;
    --(node->*count);
    node->last_used = time;
    if (node->is_root()) {
      drop_if_empty(*node);
    } else if (!node->is_held()) {
      free_.splice(free_.end(), held_, node->place);
      stats_.pinned_nbytes -= all_nbytes(*node);
    }
    node = parent;
  }
}

std::size_t PrefixNodes::remove(Node& leaf) {
  const std::size_t nbytes = all_nbytes(leaf);
  Node& parent = *leaf.parent;
  for (const auto& checkpoint : leaf.checkpoints) {
    stats_.checkpoint_nbytes -= checkpoint->nbytes;
    --stats_.checkpoints;
    parent.below.erase(checkpoint);
  }
  --stats_.blocks;
  stats_.tokens -= leaf.tokens.size();
  stats_.nbytes -= nbytes;
  parent.children.erase(leaf.among_siblings);
  free_.erase(leaf.place);
  if (parent.is_root()) drop_if_empty(parent);
  return nbytes;
}

std::size_t PrefixNodes::remove_first_checkpoint(Node& block) {
  const auto first = block.checkpoints.front();
  const std::size_t nbytes = first->nbytes;
  block.checkpoints.erase(block.checkpoints.begin());
  block.parent->below.erase(first);
  --stats_.checkpoints;
  stats_.nbytes -= nbytes;
  stats_.checkpoint_nbytes -= nbytes;
  return nbytes;
}

std::size_t PrefixNodes::remove_free(const std::string* space) {
  std::size_t nbytes = 0;
  for (auto place = free_.begin(); place != free_.end();) {
    Node& node = *place++;
    if (space == nullptr || *node.space == *space) nbytes += remove(node);
  }
  return nbytes;
}

void PrefixNodes::for_each(const std::function<void(const PrefixTree::NodeView&)>& visit) const {
  std::vector<const Node*> waiting;
  for (const auto& [space, root] : roots_) {
    waiting.assign(root.children.rbegin(), root.children.rend());
    while (!waiting.empty()) {
      const Node& node = *waiting.back();
      waiting.pop_back();
      PrefixTree::NodeView view;
      view.id = node.id;
      view.parent = node.parent->id;
      view.space = node.space;
      view.begin = node.begin;
      view.tokens = node.tokens;
      view.nbytes = all_nbytes(node);
      view.checkpoints = node.checkpoints.size();
      view.pins = node.pins;
      view.leases = node.leases;
      view.hits = node.hits;
      view.last_used = node.last_used;
      visit(view);
      waiting.insert(waiting.end(), node.children.rbegin(), node.children.rend());
    }
  }
}

}  // namespace reprise::internal
