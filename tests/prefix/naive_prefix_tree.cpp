#include "tests/prefix/naive_prefix_tree.h"

#include <algorithm>

namespace reprise {

namespace {

bool begins_with(const Tokens& tokens, const Tokens& beginning) {
  return tokens.size() >= beginning.size() && std::equal(beginning.begin(), beginning.end(), tokens.begin());
}

int shared_length(const Tokens& a, const Tokens& b) {
  const auto ends = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<int>(ends.first - a.begin());
}

Tokens first(const Tokens& tokens, int count) { return {tokens.begin(), tokens.begin() + count}; }

}  // namespace

std::size_t NaivePrefixTree::Block::nbytes() const {
  std::size_t sum = content->nbytes();
  for (const auto& [position, checkpoint] : checkpoints) sum += checkpoint->nbytes();
  return sum;
}

NaivePrefixTree::Block& NaivePrefixTree::at(int id) {
  return *std::find_if(blocks_.begin(), blocks_.end(), [id](const Block& block) { return block.id == id; });
}

std::pair<int, int> NaivePrefixTree::nearest(const std::string& space, const Tokens& tokens, int begin) const {
  const Block* best = nullptr;
  int best_shared = begin;
  for (const Block& block : blocks_) {
    if (block.begin != begin || block.space != space) continue;
    const int shared = shared_length(block.path, tokens);
    if (shared <= begin || shared < best_shared) continue;
    const auto wins_tie = [&] {
      // Not before `tokens` is better than before; then the nearer one.
      const bool late = block.path >= tokens;
      const bool best_late = best->path >= tokens;
      if (late != best_late) return late;
      return late ? block.path < best->path : block.path > best->path;
    };
    if (best == nullptr || shared > best_shared || wins_tie()) {
      best = &block;
      best_shared = shared;
    }
  }
  return best == nullptr ? std::pair(0, 0) : std::pair(best->id, best_shared - begin);
}

std::vector<NaivePrefixTree::Block*> NaivePrefixTree::path_to(int last) {
  std::vector<Block*> path;
  if (last == 0) return path;
  const Block& end = at(last);
  for (Block& block : blocks_) {
    const bool above = block.begin < end.begin && block.end() <= end.begin;
    if (block.id == last || (above && block.space == end.space && begins_with(end.path, block.path))) {
      path.push_back(&block);
    }
  }
  std::sort(path.begin(), path.end(), [](const Block* a, const Block* b) { return a->begin > b->begin; });
  return path;
}

void NaivePrefixTree::hold(int last, int Block::*count) {
  for (Block* block : path_to(last)) {
    ++(block->*count);
    block->last_used = clock_.now();
  }
}

void NaivePrefixTree::release(int last, int Block::*count) {
  for (Block* block : path_to(last)) {
    --(block->*count);
    block->last_used = clock_.now();
    block->order = ++uses_;
  }
}

void NaivePrefixTree::remove(int id) {
  blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), [id](const Block& block) { return block.id == id; }));
}

NaivePrefixTree::Match NaivePrefixTree::find(const std::string& space, const Tokens& tokens,
                                             bool needs_checkpoint) const {
  Match match;
  if (needs_checkpoint) {
    for (const Block& block : blocks_) {
      if (block.space != space) continue;
      for (const auto& [position, checkpoint] : block.checkpoints) {
        if (position > match.length && begins_with(tokens, first(block.path, position))) {
          match.length = position;
          match.last = block.id;
          match.checkpoint = checkpoint;
        }
      }
    }
  } else {
    for (;;) {
      const auto [next, shared] = nearest(space, tokens, match.length);
      if (next == 0) break;
      match.last = next;
      match.length += shared;
      if (shared < options_.block_size) break;
    }
  }
  for (const Block* block : const_cast<NaivePrefixTree*>(this)->path_to(match.last)) {
    match.blocks.push_back({block->begin, std::min(block->end(), match.length), block->content});
  }
  std::reverse(match.blocks.begin(), match.blocks.end());
  return match;
}

NaivePrefixTree::Match NaivePrefixTree::match(const std::string& space, const Tokens& tokens, bool needs_checkpoint) {
  const Match match = find(space, tokens, needs_checkpoint);
  for (Block* block : path_to(match.last)) ++block->hits;
  hold(match.last, &Block::leases);
  return match;
}

int NaivePrefixTree::insert(const std::string& space, const Tokens& tokens, const PrefixTree::MakeContent& make,
                            int* lease) {
  int path = 0;  // held up to there
  const auto move_on = [&](int to) {
    hold(to, &Block::leases);
    for (Block* block : path_to(path)) --block->leases;
    path = to;
  };
  try {
    for (int begin = 0; begin < static_cast<int>(tokens.size()); begin += options_.block_size) {
      const int end = std::min(static_cast<int>(tokens.size()), begin + options_.block_size);
      const Tokens wanted = first(tokens, end);
      const auto [near, shared] = nearest(space, wanted, begin);
      if (near != 0 && begin + shared == end) {
        move_on(near);
        continue;
      }
      const bool longer = near != 0 && begin + shared == at(near).end();
      if (longer) move_on(near);
      StoredRef content = make(begin, end);
      if (!content || !make_room(content->nbytes(), longer ? at(near).content->nbytes() : 0)) break;
      if (longer) {
        at(near).path = wanted;
        at(near).content = content;
      } else {
        Block block;
        block.id = ++last_id_;
        block.space = space;
        block.begin = begin;
        block.path = wanted;
        block.content = content;
        blocks_.push_back(block);
        move_on(block.id);
      }
    }
  } catch (...) {
    release(path, &Block::leases);
    throw;
  }
  const Match stored = find(space, tokens, false);
  move_on(stored.last);
  if (lease != nullptr) std::swap(*lease, path);
  release(path, &Block::leases);
  return stored.length;
}

bool NaivePrefixTree::make_room(std::size_t nbytes, std::size_t replaced) {
  const PrefixTreeStats now = stats();
  if (now.pinned_nbytes - replaced + nbytes > options_.max_bytes) return false;
  while (stats().nbytes - replaced + nbytes > options_.max_bytes) evict_one();
  return true;
}

bool NaivePrefixTree::insert_checkpoint(const std::string& space, const Tokens& tokens, const StoredRef& content) {
  const Match stored = find(space, tokens, false);
  const int position = static_cast<int>(tokens.size());
  if (position == 0 || stored.length < position) return false;
  int last = stored.last;
  std::size_t replaced = 0;
  for (const Block& block : blocks_) {
    const auto earlier = block.checkpoints.find(position);
    if (block.space == space && earlier != block.checkpoints.end() && begins_with(block.path, tokens)) {
      last = block.id;
      replaced = earlier->second->nbytes();
    }
  }
  hold(last, &Block::leases);
  const bool fits = make_room(content->nbytes(), replaced);
  if (fits) at(last).checkpoints[position] = content;
  release(last, &Block::leases);
  return fits;
}

NaivePrefixTree::Block* NaivePrefixTree::oldest() {
  Block* oldest = nullptr;
  for (Block& block : blocks_) {
    if (block.pins + block.leases == 0 && (oldest == nullptr || block.order < oldest->order)) oldest = &block;
  }
  return oldest;
}

std::optional<std::size_t> NaivePrefixTree::evict_one() {
  Block* block = oldest();
  if (block == nullptr) return std::nullopt;
  if (block->checkpoints.size() > 1) {
    const std::size_t nbytes = block->checkpoints.begin()->second->nbytes();
    block->checkpoints.erase(block->checkpoints.begin());
    ++counted_.evicted_checkpoints;
    return nbytes;
  }
  const std::size_t nbytes = block->nbytes();
  counted_.evicted_checkpoints += block->checkpoints.size();
  ++counted_.evicted_blocks;
  remove(block->id);
  return nbytes;
}

std::size_t NaivePrefixTree::expire() {
  std::size_t nbytes = 0;
  if (!options_.ttl) return nbytes;
  for (std::size_t i = 0; i < blocks_.size();) {
    const Block& block = blocks_[i];
    if (block.pins + block.leases == 0 && clock_.now() - block.last_used >= *options_.ttl) {
      nbytes += block.nbytes();
      ++counted_.expired_blocks;
      remove(block.id);
    } else {
      ++i;
    }
  }
  return nbytes;
}

std::size_t NaivePrefixTree::clear(const std::optional<std::string>& space) {
  const std::size_t before = stats().nbytes;
  std::erase_if(
      blocks_, [&](const Block& block) { return block.pins + block.leases == 0 && (!space || block.space == *space); });
  return before - stats().nbytes;
}

int NaivePrefixTree::pin(const std::string& space, const Tokens& tokens) {
  const Match stored = find(space, tokens, false);
  if (stored.length > 0) {
    hold(stored.last, &Block::pins);
    pins_[{space, tokens}].push_back(stored.last);
  }
  return stored.length;
}

bool NaivePrefixTree::unpin(const std::string& space, const Tokens& tokens) {
  const auto pinned = pins_.find({space, tokens});
  if (pinned == pins_.end() || pinned->second.empty()) return false;
  release(pinned->second.back(), &Block::pins);
  pinned->second.pop_back();
  return true;
}

PrefixTreeStats NaivePrefixTree::stats() const {
  PrefixTreeStats stats = counted_;
  for (const Block& block : blocks_) {
    ++stats.blocks;
    stats.checkpoints += block.checkpoints.size();
    stats.tokens += static_cast<std::size_t>(block.end() - block.begin);
    stats.nbytes += block.nbytes();
    stats.checkpoint_nbytes += block.nbytes() - block.content->nbytes();
    if (block.pins + block.leases > 0) stats.pinned_nbytes += block.nbytes();
  }
  return stats;
}

}  // namespace reprise
