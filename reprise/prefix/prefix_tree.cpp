#include "reprise/prefix/prefix_tree.h"

#include <algorithm>

#include "reprise/base/error.h"
#include "reprise/prefix/prefix_nodes.h"

namespace reprise {

using internal::Checkpoint;
using internal::Node;
using internal::PrefixNodes;
using internal::TokenSpan;

namespace {

void check(const PrefixTreeOptions& options) {
  if (options.block_size < 1) {
    throw Error(ErrorCode::invalid_argument,
                "[PrefixTree] block_size must be at least 1, but got " + std::to_string(options.block_size));
  }
  if (options.ttl && options.ttl->count() < 0) {
    throw Error(ErrorCode::invalid_argument,
                "[PrefixTree] ttl must not be negative, but got " + std::to_string(options.ttl->count()) + " ms");
  }
}

// How far given tokens are stored.
struct Walk {
  Node* node =
      nullptr;  // the last one with children to look at, all of whose tokens are among them; null: no such space
  Node* next = nullptr;  // the child that shares some more
  int shared = 0;        // so many

  int length() const { return node == nullptr ? 0 : node->end() + shared; }
  Node* last() const { return next != nullptr ? next : node; }
};

}  // namespace

struct PrefixTree::Impl {
  Impl(const PrefixTreeOptions& given, const Clock& clock) : options(given), nodes(clock) {}

  // The tokens that a child of `parent` may have.
  TokenSpan below(const Node& parent, TokenSpan tokens) const {
    const TokenSpan rest = tokens.subspan(static_cast<std::size_t>(parent.end()));
    return rest.first(std::min(rest.size(), static_cast<std::size_t>(options.block_size)));
  }

  Walk walk(const std::string& space, TokenSpan tokens) const {
    Walk walk;
    walk.node = nodes.find_root(space);
    if (walk.node == nullptr) return walk;
    for (;;) {
      const auto [child, shared] = PrefixNodes::nearest_child(*walk.node, below(*walk.node, tokens));
      if (shared < options.block_size) {
        walk.next = child;
        walk.shared = shared;
        return walk;
      }
      walk.node = child;
    }
  }

  // Of those on the way and beside it.
  const Checkpoint* last_checkpoint(const Walk& walk, TokenSpan tokens) const {
    for (const Node* parent = walk.node; parent != nullptr; parent = parent->parent) {
      if (const Checkpoint* found = PrefixNodes::longest_checkpoint(*parent, below(*parent, tokens))) return found;
    }
    return nullptr;
  }

  std::optional<std::size_t> evict_one() {
    Node* oldest = nodes.oldest();
    if (oldest == nullptr) return std::nullopt;
    PrefixTreeStats& stats = nodes.stats();
    if (oldest->checkpoints.size() > 1) {
      ++stats.evicted_checkpoints;
      return nodes.remove_first_checkpoint(*oldest);
    }
    stats.evicted_checkpoints += oldest->checkpoints.size();
    ++stats.evicted_blocks;
    return nodes.remove(*oldest);
  }

  // For `nbytes` more where `replaced` go, which are held. Returns: false, and nothing is evicted, when what is held
  // leaves too little.
  bool make_room(std::size_t nbytes, std::size_t replaced) {
    const PrefixTreeStats& stats = nodes.stats();
    if (nbytes > options.max_bytes || stats.pinned_nbytes - replaced > options.max_bytes - nbytes) return false;
    while (stats.nbytes - replaced > options.max_bytes - nbytes) evict_one();
    return true;
  }

  PrefixTreeOptions options;
  PrefixNodes nodes;
  // By the tokens that were asked for: the ends of what was stored of them then, in the order of pinning.
  std::map<std::string, std::multimap<Tokens, Node*, internal::ByTokens>> pins;
};

class PrefixTree::Lease {
 public:
  explicit Lease(const std::shared_ptr<Impl>& tree) : tree_(tree) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    const auto tree = tree_.lock();
    if (tree && node_ != nullptr) tree->nodes.release(*node_, &Node::leases);
  }

  Node* node() const { return node_; }
  // From where it is, or from nowhere. Requires: `node` is below where it is; the tree lives.
  void descend(Node& node) {
    tree_.lock()->nodes.hold(node, &Node::leases, node_);
    node_ = &node;
  }
  void swap(Lease& other) noexcept {
    tree_.swap(other.tree_);
    std::swap(node_, other.node_);
  }

 private:
  std::weak_ptr<Impl> tree_;
  Node* node_ = nullptr;
};

PrefixTree::PrefixTree(const PrefixTreeOptions& options, const Clock& clock) {
  check(options);
  impl_ = std::make_shared<Impl>(options, clock);
}

PrefixTree::~PrefixTree() = default;

PrefixTree::Match PrefixTree::match(const std::string& space, TokenSpan tokens, bool needs_checkpoint) {
  const Walk walk = impl_->walk(space, tokens);
  Match match;
  Node* last = walk.last();
  match.length = walk.length();
  if (needs_checkpoint) {
    const Checkpoint* checkpoint = impl_->last_checkpoint(walk, tokens);
    if (checkpoint == nullptr) return {};
    last = checkpoint->block;
    match.length = last->begin + checkpoint->offset;
    match.checkpoint = checkpoint->content;
  }
  if (match.length == 0) return {};
  match.lease = std::make_shared<Lease>(impl_);
  for (Node* node = last; !node->is_root(); node = node->parent) {
    match.blocks.push_back({node->begin, std::min(node->end(), match.length), node->content});
  }
  std::reverse(match.blocks.begin(), match.blocks.end());
  for (Node* node = last; node != nullptr; node = node->parent) ++node->hits;
  match.lease->descend(*last);
  return match;
}

int PrefixTree::matched_length(const std::string& space, TokenSpan tokens, bool needs_checkpoint) const {
  const Walk walk = impl_->walk(space, tokens);
  if (!needs_checkpoint) return walk.length();
  const Checkpoint* checkpoint = impl_->last_checkpoint(walk, tokens);
  return checkpoint == nullptr ? 0 : checkpoint->block->begin + checkpoint->offset;
}

int PrefixTree::insert(const std::string& space, TokenSpan tokens, const MakeContent& make,
                       std::shared_ptr<Lease>* lease) {
  // Holds what is there already, and then each block as it comes, so that no block evicts one before it.
  Lease path(impl_);
  PrefixNodes& nodes = impl_->nodes;
  path.descend(nodes.root(space));
  int stored = 0;
  for (TokenSpan wanted = impl_->below(*path.node(), tokens); !wanted.empty();) {
    Node& parent = *path.node();
    const int size = static_cast<int>(wanted.size());
    const auto [child, shared] = PrefixNodes::nearest_child(parent, wanted);
    const bool longer = child != nullptr && shared == static_cast<int>(child->tokens.size()) && shared < size;
    if (shared == size || longer) path.descend(*child);
    if (shared < size) {
      StoredRef content = make(stored, stored + size);
      const std::size_t nbytes = content ? content->nbytes() : 0;
      if (!content || !impl_->make_room(nbytes, longer ? child->nbytes : 0)) {
        if (!longer) {
          const auto [partial, some] = PrefixNodes::nearest_child(parent, wanted);
          if (partial != nullptr) path.descend(*partial);
          stored += some;
        } else {
          stored += shared;
        }
        break;
      }
      if (longer) {
        nodes.extend(*child, wanted, std::move(content), nbytes);
      } else {
        path.descend(nodes.add(parent, wanted, std::move(content), nbytes));
      }
    }
    stored += size;
    wanted = stored == path.node()->end() ? impl_->below(*path.node(), tokens) : TokenSpan();
  }
  if (lease != nullptr) {
    if (!*lease) *lease = std::make_shared<Lease>(impl_);
    (*lease)->swap(path);
  }
  return stored;
}

bool PrefixTree::insert_checkpoint(const std::string& space, TokenSpan tokens, StoredRef content) {
  if (!content) throw Error(ErrorCode::invalid_argument, "[PrefixTree] a checkpoint needs a content, but got null");
  const Walk walk = impl_->walk(space, tokens);
  if (tokens.empty() || walk.length() < static_cast<int>(tokens.size())) return false;
  Node& parent = *walk.last()->parent;
  const Checkpoint* earlier = PrefixNodes::exact_checkpoint(parent, impl_->below(parent, tokens));
  Node& block = earlier != nullptr ? *earlier->block : *walk.last();
  Lease path(impl_);
  path.descend(block);
  const std::size_t nbytes = content->nbytes();
  if (!impl_->make_room(nbytes, earlier != nullptr ? earlier->nbytes : 0)) return false;
  if (earlier != nullptr) {
    impl_->nodes.replace_checkpoint(*earlier, std::move(content), nbytes);
  } else {
    impl_->nodes.add_checkpoint(block, static_cast<int>(tokens.size()) - block.begin, std::move(content), nbytes);
  }
  return true;
}

std::optional<std::size_t> PrefixTree::evict_one() { return impl_->evict_one(); }

std::size_t PrefixTree::expire() {
  std::size_t nbytes = 0;
  if (!impl_->options.ttl) return nbytes;
  const Clock::TimePoint now = impl_->nodes.now();
  const auto expired = [&](const Node& node) {
    return std::chrono::floor<std::chrono::milliseconds>(now - node.last_used) >= *impl_->options.ttl;
  };
  for (Node* oldest = impl_->nodes.oldest(); oldest != nullptr && expired(*oldest); oldest = impl_->nodes.oldest()) {
    nbytes += impl_->nodes.remove(*oldest);
    ++impl_->nodes.stats().expired_blocks;
  }
  return nbytes;
}

std::size_t PrefixTree::clear(const std::optional<std::string>& space) {
  return impl_->nodes.remove_free(space ? &*space : nullptr);
}

int PrefixTree::pin(const std::string& space, TokenSpan tokens) {
  const Walk walk = impl_->walk(space, tokens);
  if (walk.length() == 0) return 0;
  impl_->pins[space].emplace(Tokens(tokens.begin(), tokens.end()), walk.last());
  impl_->nodes.hold(*walk.last(), &Node::pins);
  return walk.length();
}

bool PrefixTree::unpin(const std::string& space, TokenSpan tokens) {
  const auto there = impl_->pins.find(space);
  if (there == impl_->pins.end()) return false;
  const auto [first, after] = there->second.equal_range(tokens);
  if (first == after) return false;
  const auto latest = std::prev(after);
  Node* last = latest->second;
  there->second.erase(latest);
  if (there->second.empty()) impl_->pins.erase(there);
  impl_->nodes.release(*last, &Node::pins);
  return true;
}

const PrefixTreeStats& PrefixTree::stats() const { return impl_->nodes.stats(); }

void PrefixTree::for_each(const std::function<void(const NodeView&)>& visit) const { impl_->nodes.for_each(visit); }

}  // namespace reprise
