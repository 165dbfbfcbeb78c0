// LRUPromptCache against the plainest store that must answer the same, and what it gives back against cold runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "reprise/cache/kv_cache.h"
#include "reprise/cache/lru_prompt_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/stored_caches.h"

namespace reprise {
namespace {

using namespace cache_test;

// A list, searched from end to end.
class NaiveStore {
 public:
  struct Entry {
    std::string model;
    Tokens tokens;
    CacheType type;
    std::size_t bytes;
    bool trimmable;
    int used;
  };

  NaiveStore(std::size_t max_size, std::size_t max_bytes) : max_size_(max_size), max_bytes_(max_bytes) {}

  // How many tokens are reused; none for a miss.
  std::optional<std::size_t> fetch(const std::string& model, const Tokens& tokens) {
    if (tokens.empty()) return std::nullopt;
    const std::size_t usable = tokens.size() - 1;
    Entry* best = nullptr;
    for (Entry& entry : entries) {  // the prompt itself
      if (entry.model == model && entry.tokens == tokens && entry.trimmable) return hit(entry, usable);
    }
    std::size_t common = 0;
    for (Entry& entry : entries) {
      if (entry.model != model) continue;
      const std::size_t shared = std::min(usable, shared_length(entry.tokens, tokens));
      common = std::max(common, shared);
      const bool prefix = entry.tokens.size() == shared && shared > 0;
      if (prefix && (!best || entry.tokens.size() > best->tokens.size())) best = &entry;
    }
    if (common > (best ? best->tokens.size() : 0)) {
      Entry* longer = nullptr;
      for (Entry& entry : entries) {
        if (entry.model != model || shared_length(entry.tokens, tokens) < common) continue;
        const bool earlier =
            longer && (entry.tokens.size() < longer->tokens.size() ||
                       (entry.tokens.size() == longer->tokens.size() && entry.tokens < longer->tokens));
        if (!longer || earlier) longer = &entry;
      }
      if (longer->trimmable) return hit(*longer, common);
    }
    return best ? std::optional(hit(*best, best->tokens.size())) : std::nullopt;
  }

  void insert(Entry added) {
    if (added.bytes > max_bytes_) return;
    std::erase_if(entries, [&](const Entry& entry) {
      const bool prefix = shared_length(entry.tokens, added.tokens) == entry.tokens.size();
      return entry.model == added.model && prefix && (added.trimmable || entry.tokens.size() == added.tokens.size());
    });
    added.used = ++clock_;
    entries.push_back(std::move(added));
    while (entries.size() > max_size_ || bytes() > max_bytes_) evict();
  }

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const Entry& entry : entries) sum += entry.bytes;
    return sum;
  }

  std::vector<Entry> entries;

 private:
  static std::size_t shared_length(const Tokens& a, const Tokens& b) {
    return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  }

  std::size_t hit(Entry& entry, std::size_t length) {
    entry.used = ++clock_;
    return length;
  }

  void evict() {
    std::array<int, 3> counts{};
    for (const Entry& entry : entries) ++counts[static_cast<std::size_t>(entry.type)];
    CacheType from = CacheType::system;
    if (counts[0] > 0 && counts[0] >= counts[1]) {
      from = CacheType::assistant;
    } else if (counts[1] > 0 && counts[1] >= counts[2]) {
      from = CacheType::user;
    }
    auto oldest = entries.end();
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      if (entry->type == from && (oldest == entries.end() || entry->used < oldest->used)) oldest = entry;
    }
    entries.erase(oldest);
  }

  std::size_t max_size_;
  std::size_t max_bytes_;
  int clock_ = 0;
};

// What is fetched is extended by what remains and must then show the rows of a cold run of the whole prompt.
TEST(LRUPromptCache, T3RandomHistoriesAgreeWithAPlainListAndWarmEqualsCold) {
  std::mt19937 random(17);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int history = 0; history < 12; ++history) {
    const auto max_size = static_cast<std::size_t>(pick(1, 6));
    const std::size_t max_bytes = bytes_of(pick(3, 12));
    LRUPromptCache store(max_size, max_bytes);
    NaiveStore naive(max_size, max_bytes);
    int hits = 0;
    for (int step = 0; step < 120; ++step) {
      const std::string model = pick(0, 4) == 0 ? "n" : "m";
      Tokens tokens;
      for (int i = pick(0, 7); i > 0; --i) tokens.push_back(pick(0, 2));
      FetchedPromptCache fetched = store.fetch_nearest_cache(model, tokens);
      const std::optional<std::size_t> expected = naive.fetch(model, tokens);
      ASSERT_EQ(fetched.cache.has_value(), expected.has_value()) << "history " << history << ", step " << step;
      const auto reuse = static_cast<std::ptrdiff_t>(expected.value_or(0));
      ASSERT_EQ(fetched.remaining, Tokens(tokens.begin() + reuse, tokens.end()));

      if (fetched.cache) {
        ++hits;
        PromptCache& warm = *fetched.cache;
        ASSERT_EQ(tokens_in(warm), Tokens(tokens.begin(), tokens.begin() + reuse));
        const KeysValues stored = warm.at<AttentionCache>(0).keys_and_values();
        const int size = std::get<DenseKV>(stored).keys.shape(3);
        if (dynamic_cast<KVCache*>(&warm[0])) {
          append(warm, fetched.remaining, {.heads = 1, .key_size = size, .value_size = size});
          PromptCache cold = holding(tokens, size);
          ASSERT_EQ(tokens_in(warm), tokens_in(cold));
        }
      }
      if (pick(0, 2) == 0) continue;
      const auto type = static_cast<CacheType>(pick(0, 2));
      const int size = pick(1, 3);
      const bool ring = !tokens.empty() && pick(0, 3) == 0;
      PromptCache cache = ring             ? ring_holding(tokens)
                          : tokens.empty() ? make_kv_prompt_cache(2)
                                           : holding(tokens, size);
      const std::size_t bytes = prompt_cache_nbytes(cache);
      store.insert_cache(model, tokens, std::move(cache), type);
      naive.insert({model, tokens, type, bytes, !ring || tokens.size() < 4, 0});
      ASSERT_EQ(store.size(), naive.entries.size());
      ASSERT_EQ(store.nbytes(), naive.bytes());
      for (const auto& [kind, stats] : store.stats_by_type()) {
        std::size_t count = 0, sum = 0;
        for (const auto& entry : naive.entries) {
          if (entry.type != kind) continue;
          ++count;
          sum += entry.bytes;
        }
        ASSERT_EQ(stats.sequences, count);
        ASSERT_EQ(stats.bytes, sum);
      }
    }
    EXPECT_GT(hits, 10);
  }
}

}  // namespace
}  // namespace reprise
