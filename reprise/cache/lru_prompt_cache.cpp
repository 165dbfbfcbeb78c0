#include "reprise/cache/lru_prompt_cache.h"

#include <algorithm>
#include <utility>

#include "reprise/base/error.h"

namespace reprise {

FetchedPromptCache LRUPromptCache::fetch_nearest_cache(const std::string& model, std::span<const TokenId> tokens) {
  if (tokens.empty()) return {std::nullopt, {}};
  // The last token is never reused: a model must be given one to answer.
  const auto usable = tokens.first(tokens.size() - 1);
  if (Entry* entry = trie_.get(model, tokens); entry && can_trim_prompt_cache(entry->cache, 1)) {
    return hit(*entry, tokens, usable.size());
  }
  const PromptTrieResult found = trie_.search(model, usable);
  if (found.exact && !usable.empty()) return hit(*trie_.get(model, usable), tokens, usable.size());
  const std::size_t shorter_length = found.shorter ? found.shorter->size() : 0;
  if (found.longer && found.common_prefix > shorter_length) {
    Entry& entry = *trie_.get(model, *found.longer);
    if (can_trim_prompt_cache(entry.cache, static_cast<int>(found.longer->size() - found.common_prefix))) {
      return hit(entry, tokens, found.common_prefix);
    }
  }
  if (shorter_length > 0) return hit(*trie_.get(model, *found.shorter), tokens, shorter_length);
  return {std::nullopt, Tokens(tokens.begin(), tokens.end())};
}

FetchedPromptCache LRUPromptCache::hit(Entry& entry, std::span<const TokenId> tokens, std::size_t reused) {
  PromptCache fork = entry.cache.fork();
  const int surplus = static_cast<int>(entry.place->tokens.size() - reused);
  if (surplus > 0) trim_prompt_cache(fork, surplus);
  check_prompt_cache(fork, static_cast<int>(reused));
  Order& order = of(entry.type).order;
  order.splice(order.end(), order, entry.place);
  const auto rest = tokens.subspan(reused);
  return {std::move(fork), Tokens(rest.begin(), rest.end())};
}

bool LRUPromptCache::insert_cache(const std::string& model, std::span<const TokenId> tokens, PromptCache cache,
                                  CacheType type) {
  check_prompt_cache(cache, static_cast<int>(tokens.size()));
  cache.eval();
  const std::size_t bytes = prompt_cache_nbytes(cache);
  if (bytes > max_bytes_ || max_size_ == 0) return false;

  // How much can be cut off with all kept that the shorter history needs: prefixes so near add nothing.
  std::size_t covered = can_trim_prompt_cache(cache) ? tokens.size() : 0;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    covered = std::min(covered, static_cast<std::size_t>(cache[layer].max_trim()));
  }
  Order place;
  place.push_back({model, Tokens(tokens.begin(), tokens.end())});
  const auto key = place.begin();

  if (const auto replaced = trie_.add(model, tokens, Entry{std::move(cache), bytes, type, key})) forget(*replaced);
  Type& own = of(type);
  own.order.splice(own.order.end(), place);
  own.nbytes += bytes;
  for (const auto& [length, entry] : trie_.pop_prefixes(model, tokens, tokens.size() - covered)) forget(entry);
  trim_to(max_size_, max_bytes_);
  return trie_.get(model, tokens) != nullptr;
}

void LRUPromptCache::trim_to(std::optional<std::size_t> sequences, std::optional<std::size_t> bytes) {
  while (size() > sequences.value_or(kUnlimited)) evict_one();
  while (nbytes() > bytes.value_or(kUnlimited)) evict_one();
}

void LRUPromptCache::evict_one() {
  // From the first type that has at least as many entries as the next one.
  std::size_t type = 0;
  while (type + 1 < types_.size() &&
         (types_[type].order.empty() || types_[type].order.size() < types_[type + 1].order.size())) {
    ++type;
  }
  const Key& oldest = types_[type].order.front();
  if (const auto entry = trie_.pop(oldest.model, oldest.tokens)) forget(*entry);
}

void LRUPromptCache::forget(const Entry& entry) {
  Type& type = of(entry.type);
  type.nbytes -= entry.nbytes;
  type.order.erase(entry.place);
}

std::size_t LRUPromptCache::size() const {
  std::size_t count = 0;
  for (const Type& type : types_) count += type.order.size();
  return count;
}

std::size_t LRUPromptCache::nbytes() const {
  std::size_t bytes = 0;
  for (const Type& type : types_) bytes += type.nbytes;
  return bytes;
}

std::map<CacheType, CacheTypeStats> LRUPromptCache::stats_by_type() const {
  std::map<CacheType, CacheTypeStats> stats;
  for (const CacheType type : {CacheType::assistant, CacheType::user, CacheType::system}) {
    const Type& counted = types_[static_cast<std::size_t>(type)];
    stats[type] = {counted.order.size(), counted.nbytes};
  }
  return stats;
}

}  // namespace reprise
