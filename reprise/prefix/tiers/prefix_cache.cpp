#include "reprise/prefix/tiers/prefix_cache.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise {

namespace {

void check_options(const PrefixCacheOptions& options) {
  if (options.block_size >= kernels::kPageRows && options.block_size % kernels::kPageRows == 0) return;
  throw Error(ErrorCode::invalid_argument, "[PrefixCache] block_size must be a multiple of " +
                                               std::to_string(kernels::kPageRows) + ", but got " +
                                               std::to_string(options.block_size));
}

// Pages that wait to be written are held until they are: no large part of the budget.
std::unique_ptr<DiskTier> open_disk(const PrefixCacheOptions& options, const std::string& space) {
  if (!options.disk) return nullptr;
  DiskTierOptions disk = *options.disk;
  disk.owner = space;  // of all salts
  disk.block_size = options.block_size;
  disk.max_queued_bytes = std::min(disk.max_queued_bytes, options.max_bytes / 4);
  return std::make_unique<DiskTier>(disk);
}

}  // namespace

PrefixCache::PrefixCache(PromptCache form, std::string space, std::shared_ptr<PagePool> pool,
                         const PrefixCacheOptions& options, const Clock& clock)
    : form_(std::move(form)),
      space_(std::move(space)),
      pool_(std::move(pool)),
      options_((check_options(options), options)),
      needs_checkpoint_(needs_checkpoint(form_)),
      // The tree counts a page once for each block that holds it, the pool once in all: the budget is kept by the pool.
      tree_({.block_size = options.block_size, .ttl = options.ttl}, clock),
      disk_(open_disk(options, space_)) {}

std::string PrefixCache::space_of(const std::string& salt) const { return space_ + "|salt=" + salt; }

int PrefixCache::cached_length(const std::string& salt, std::span<const TokenId> tokens) const {
  if (tokens.size() < 2) return 0;
  return tree_.matched_length(space_of(salt), tokens.first(tokens.size() - 1), needs_checkpoint_);
}

FetchedPrefix PrefixCache::fetch(const std::string& salt, std::span<const TokenId> tokens) {
  ++stats_.fetches;
  stats_.asked_tokens += tokens.size();
  if (tokens.size() < 2) return {form_.fork(), 0, nullptr};
  const std::string space = space_of(salt);
  const auto prefix = tokens.first(tokens.size() - 1);
  PrefixTree::Match match = tree_.match(space, prefix, needs_checkpoint_);
  const int in_memory = match.length;
  if (disk_ && static_cast<std::size_t>(in_memory) < prefix.size() && load(space, prefix, in_memory, match.lease)) {
    // The old lease goes only when there is a new one.
    PrefixTree::Match longer = tree_.match(space, prefix, needs_checkpoint_);
    match = std::move(longer);
  }
  while (match.length > 0) {
    try {
      PromptCache cache = rebuild_prompt_cache(form_, match.blocks, match.length, match.checkpoint);
      ++stats_.hits;
      stats_.hit_tokens += static_cast<std::uint64_t>(match.length);
      stats_.disk_hit_tokens += static_cast<std::uint64_t>(std::max(0, match.length - in_memory));
      return {std::move(cache), match.length, std::move(match.lease)};
    } catch (const Error& error) {
      refuse(error.what());
      if (needs_checkpoint_ || match.blocks.empty()) break;
      match.blocks.pop_back();
      match.length = match.blocks.empty() ? 0 : match.blocks.back().end;
    }
  }
  return {form_.fork(), 0, nullptr};
}

bool PrefixCache::load(const std::string& space, std::span<const TokenId> tokens, int length, Lease& lease) {
  try {
    const DiskTier::Found found = disk_->find(space, tokens, needs_checkpoint_);
    if (found.length <= length) return false;
    for (const auto& piece : found.blocks) {
      const auto known = tokens.first(static_cast<std::size_t>(piece.end));
      const auto nothing = [](int, int) { return StoredRef(); };
      // What is there stays while the rest is read.
      if (tree_.insert(space, known, nothing, &lease) >= piece.end) continue;
      if (!load_block(space, known, piece, lease)) return !needs_checkpoint_;
    }
    if (!needs_checkpoint_) return true;
    return found.checkpoint &&
           load_checkpoint(space, tokens.first(static_cast<std::size_t>(found.length)), *found.checkpoint);
  } catch (const Error& error) {
    refuse(error.what());
    return !needs_checkpoint_;
  }
}

bool PrefixCache::load_block(const std::string& space, std::span<const TokenId> tokens,
                             const DiskTier::Found::Piece& piece, Lease& lease) {
  const auto file = disk_->read(piece.file);
  if (!file || !make_room(pages_nbytes(*file))) return false;
  auto block = block_from_tensors(*file, pool_);
  if (block->begin != piece.begin || block->end < piece.end) {
    refuse("a file holds rows [" + std::to_string(block->begin) + ", " + std::to_string(block->end) + ") of a block [" +
           std::to_string(piece.begin) + ", " + std::to_string(piece.end) + ")");
    return false;
  }
  const auto make = [&](int begin, int end) -> StoredRef {
    return begin == piece.begin && end == piece.end ? cut_block(*block, end) : nullptr;
  };
  return tree_.insert(space, tokens, make, &lease) >= piece.end;
}

bool PrefixCache::load_checkpoint(const std::string& space, std::span<const TokenId> tokens, const std::string& file) {
  const auto tensors = disk_->read(file);
  if (!tensors) return false;
  auto checkpoint = checkpoint_from_tensors(*tensors);
  if (checkpoint->position != static_cast<int>(tokens.size())) {
    refuse("a checkpoint of " + std::to_string(tokens.size()) + " tokens is of " +
           std::to_string(checkpoint->position));
    return false;
  }
  return make_room(checkpoint->nbytes()) && tree_.insert_checkpoint(space, tokens, std::move(checkpoint));
}

int PrefixCache::store(const std::string& salt, std::span<const TokenId> tokens, const PromptCache& cache,
                       std::shared_ptr<PrefixTree::Lease>* lease, const StoreOptions& options) {
  if (tokens.empty()) return 0;
  try {
    check_prompt_cache(cache, static_cast<int>(tokens.size()));
  } catch (const Error& error) {
    refuse(error.what());
    return 0;
  }
  const std::string space = space_of(salt);
  std::vector<DiskTier::Block> made;
  const auto make = [&](int begin, int end) -> StoredRef {
    try {
      made.push_back({begin, end, cut_block(cache, begin, end)});
    } catch (const Error& error) {
      // Rows that no query sees any more have been given up, and what was stored of them is evicted: nothing can be
      // stored beyond the gap.
      if (error.code() != ErrorCode::invalid_argument) throw;
      return nullptr;
    }
    return made.back().content;
  };
  const int stored = tree_.insert(space, tokens, make, lease);

  StoredRef checkpoint;
  if (options.checkpoint && needs_checkpoint_) {
    auto taken = take_checkpoint(cache, static_cast<int>(tokens.size()));
    if (make_room(taken->nbytes()) && tree_.insert_checkpoint(space, tokens, taken)) checkpoint = std::move(taken);
  }
  if (disk_) {
    if (options.finished) {
      // All of it once more: what is there is touched, what was dropped gets there after all.
      made.clear();
      for (int begin = 0; begin < stored; begin += options_.block_size) {
        if (!make(begin, std::min(begin + options_.block_size, stored))) break;
      }
    }
    if (!options.finished) {
      std::erase_if(made, [&](const auto& block) { return block.end - block.begin < options_.block_size; });
    }
    disk_->write_blocks(space, tokens, std::move(made));
    if (checkpoint) disk_->write_checkpoint(space, tokens, std::move(checkpoint));
  }
  make_room(0);
  return stored;
}

void PrefixCache::clear(const std::optional<std::string>& salt) {
  const auto space = salt ? std::optional(space_of(*salt)) : std::nullopt;
  tree_.clear(space);
  if (disk_) disk_->clear(space);
}

std::size_t PrefixCache::nbytes() const {
  return pool_->nbytes() + tree_.stats().checkpoint_nbytes + live_state_nbytes_;
}

bool PrefixCache::make_room(std::size_t bytes) {
  if (bytes > options_.max_bytes) return false;
  const std::size_t most = options_.max_bytes - bytes;
  if (nbytes() <= most) return true;
  // What waits to be written holds its pages, also those that are evicted.
  const auto flush_evicted = [&] {
    if (!disk_ || !evicted_since_flush_) return false;
    disk_->flush();
    evicted_since_flush_ = false;
    return true;
  };
  // At most that much can go; where it is not enough, all of it stays.
  const auto is_possible = [&] {
    const PrefixTreeStats& tree = tree_.stats();
    const std::size_t removable = tree.nbytes - std::min(tree.nbytes, tree.pinned_nbytes);
    return nbytes() - std::min(nbytes(), removable) <= most;
  };
  if (!is_possible() && (!flush_evicted() || !is_possible())) return false;
  while (nbytes() > most) {
    const std::size_t before = nbytes();
    const auto evicted = tree_.evict_one();
    evicted_since_flush_ = evicted_since_flush_ || evicted.has_value();
    const bool is_held = evicted && *evicted > 0 && nbytes() == before;
    if (is_held) flush_evicted();
    if (!evicted && !flush_evicted()) return nbytes() <= most;
  }
  return true;
}

void PrefixCache::flush() {
  if (disk_) disk_->flush();
}

PrefixCacheStats PrefixCache::stats() const {
  PrefixCacheStats stats = stats_;
  stats.tree = tree_.stats();
  if (disk_) stats.disk = disk_->stats();
  return stats;
}

void PrefixCache::refuse(const std::string& why) {
  ++stats_.refused;
  log(LogLevel::warning, "[PrefixCache] an entry is refused: " + why);
}

}  // namespace reprise
