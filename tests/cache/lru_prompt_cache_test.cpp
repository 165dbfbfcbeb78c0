#include "reprise/cache/lru_prompt_cache.h"

#include <gtest/gtest.h>

#include <thread>

#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"
#include "tests/cache/stored_caches.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// The tokens that a fetch gives for reuse; the rest must be what remains.
std::optional<std::vector<int>> reused(LRUPromptCache& store, const Tokens& tokens, const std::string& model = "m") {
  FetchedPromptCache fetched = store.fetch_nearest_cache(model, tokens);
  if (!fetched.cache) {
    EXPECT_EQ(fetched.remaining, tokens);
    return std::nullopt;
  }
  std::vector<int> all = tokens_in(*fetched.cache);
  const std::vector<int> result = all;
  all.insert(all.end(), fetched.remaining.begin(), fetched.remaining.end());
  EXPECT_EQ(all, tokens);
  EXPECT_FALSE(fetched.remaining.empty());
  return result;
}

bool has(LRUPromptCache& store, const Tokens& tokens) {
  Tokens more = tokens;
  more.push_back(9999);
  return reused(store, more) == tokens;
}

TEST(LRUPromptCache, T3AHitRefreshesTheOrder) {
  LRUPromptCache store(2);
  const Tokens a{1, 2}, b{3, 4}, c{5, 6};
  store.insert_cache("m", a, holding(a));
  store.insert_cache("m", b, holding(b));
  EXPECT_TRUE(has(store, a));
  store.insert_cache("m", c, holding(c));
  EXPECT_FALSE(has(store, b));
  EXPECT_TRUE(has(store, a));
  EXPECT_TRUE(has(store, c));
}

TEST(LRUPromptCache, T3EveryKindOfHitRefreshesTheOrder) {
  const Tokens a{1, 2, 3, 4}, b{5, 6, 7, 8}, c{20, 21};
  for (const Tokens& query : {Tokens{1, 2, 3, 4}, {1, 2, 3, 4, 5}, {1, 2, 3, 9}, {1, 2, 3}}) {
    LRUPromptCache store(2);
    store.insert_cache("m", a, holding(a));
    store.insert_cache("m", b, holding(b));
    EXPECT_NE(reused(store, query), std::nullopt);
    store.insert_cache("m", c, holding(c));
    EXPECT_TRUE(has(store, a));
    EXPECT_FALSE(has(store, b));
  }
}

TEST(LRUPromptCache, T3AOneTokenPrefixMatches) {
  LRUPromptCache store;
  store.insert_cache("m", Tokens{7}, holding({7}));
  EXPECT_EQ(reused(store, {7, 8, 9}), std::vector<int>{7});
  EXPECT_EQ(reused(store, {7}), std::vector<int>{});
  EXPECT_EQ(reused(store, {8, 7}), std::nullopt);
  EXPECT_EQ(reused(store, {7, 8}, "other"), std::nullopt);
}

TEST(LRUPromptCache, T3AtLeastOneTokenIsLeftToProcess) {
  LRUPromptCache store;
  const Tokens tokens = range(0, 6);
  store.insert_cache("m", tokens, holding(tokens));
  EXPECT_EQ(reused(store, tokens), range(0, 5));
  EXPECT_EQ(reused(store, range(0, 3)), range(0, 2));
  EXPECT_EQ(reused(store, range(0, 9)), tokens);
  EXPECT_EQ(reused(store, {0, 1, 2, 50, 51}), range(0, 3));
  const FetchedPromptCache nothing = store.fetch_nearest_cache("m", {});
  EXPECT_FALSE(nothing.cache);
  EXPECT_TRUE(nothing.remaining.empty());
}

TEST(LRUPromptCache, T3ALongerEntryThatCannotBeTrimmedSoFarIsPassedOverForTheShorterOne) {
  LRUPromptCache store;
  store.insert_cache("m", range(0, 2), ring_holding(range(0, 2)));
  store.insert_cache("m", range(0, 8), ring_holding(range(0, 8)));  // wrapped: no prefix of it can be had
  EXPECT_EQ(store.size(), 2u);
  EXPECT_EQ(reused(store, {0, 1, 2, 3, 50}), range(0, 2));
  EXPECT_EQ(reused(store, range(0, 8)), range(0, 2));
  EXPECT_EQ(reused(store, range(0, 9)), range(0, 8));
  EXPECT_EQ(reused(store, {0, 60}), range(0, 1));  // the short one is not wrapped
}

TEST(LRUPromptCache, T3BothLimitsHoldAfterEveryInsert) {
  LRUPromptCache store(3, bytes_of(5));
  for (int i = 0; i < 20; ++i) {
    const int size = i % 4 + 1;
    const Tokens tokens{i, 100 + i};
    EXPECT_TRUE(store.insert_cache("m", tokens, holding(tokens, size), CacheType::user));
    EXPECT_LE(store.size(), 3u);
    EXPECT_LE(store.nbytes(), bytes_of(5));
    EXPECT_TRUE(has(store, tokens));
  }
}

TEST(LRUPromptCache, T3AnEntryLargerThanTheBudgetIsNotStoredAndEvictsNothing) {
  LRUPromptCache store(10, bytes_of(3));
  const Tokens a{1, 2}, b{3, 4}, large{1, 2, 3};
  store.insert_cache("m", a, holding(a));
  store.insert_cache("m", b, holding(b));
  EXPECT_FALSE(store.insert_cache("m", large, holding(large, 4)));
  EXPECT_FALSE(store.insert_cache("m", b, holding(b, 4)));
  EXPECT_EQ(store.size(), 2u);
  EXPECT_EQ(store.nbytes(), bytes_of(2));
  EXPECT_TRUE(has(store, a));
  EXPECT_TRUE(has(store, b));
  LRUPromptCache nothing(0);
  EXPECT_FALSE(nothing.insert_cache("m", a, holding(a)));
  EXPECT_EQ(nothing.size(), 0u);
  EXPECT_EQ(nothing.nbytes(), 0u);
}

TEST(LRUPromptCache, T3ATrimmableEntryReplacesAllItsProperPrefixesAndNoOthers) {
  LRUPromptCache store;
  for (const Tokens& tokens : {Tokens{1, 2, 3, 4}, {1, 9}, {1, 2, 3}, {1}, {}}) {
    PromptCache cache = make_kv_prompt_cache(2);
    if (!tokens.empty()) append(cache, tokens, {.heads = 1, .key_size = 1, .value_size = 1});
    store.insert_cache("m", tokens, std::move(cache));
  }
  store.insert_cache("m", Tokens{1, 2, 3, 4, 5}, holding({1, 2, 3, 4, 5}));
  EXPECT_EQ(store.size(), 2u);
  EXPECT_EQ(store.nbytes(), 2 * bytes_of(1));
  EXPECT_TRUE(has(store, {1, 9}));
  EXPECT_TRUE(has(store, {1, 2, 3, 4, 5}));
}

TEST(LRUPromptCache, T3AnEntryThatCannotBeTrimmedKeepsItsPrefixes) {
  LRUPromptCache store;
  store.insert_cache("m", range(0, 3), holding(range(0, 3)));
  store.insert_cache("m", range(0, 8), ring_holding(range(0, 8)));
  EXPECT_EQ(store.size(), 2u);
  EXPECT_EQ(reused(store, {0, 1, 2, 3, 50}), range(0, 3));
}

TEST(LRUPromptCache, T3TheEmptyKeySurvivesItsOwnInsertAndHelpsNobody) {
  LRUPromptCache store;
  EXPECT_TRUE(store.insert_cache("m", {}, make_kv_prompt_cache(2)));
  EXPECT_EQ(store.size(), 1u);
  EXPECT_TRUE(store.insert_cache("m", {}, make_kv_prompt_cache(2)));
  EXPECT_EQ(store.size(), 1u);
  EXPECT_EQ(reused(store, {1, 2}), std::nullopt);
  EXPECT_EQ(reused(store, {1}), std::nullopt);
  store.trim_to(0);
  EXPECT_EQ(store.size(), 0u);
}

TEST(LRUPromptCache, T3EvictionTakesFromTheFirstTypeThatIsNotTheSmaller) {
  LRUPromptCache store(3);
  const auto insert = [&](int id, CacheType type) { store.insert_cache("m", Tokens{id}, holding({id}), type); };
  insert(1, CacheType::system);
  insert(2, CacheType::user);
  insert(3, CacheType::user);
  insert(4, CacheType::assistant);  // 1 assistant < 2 user ≥ 1 system
  EXPECT_FALSE(has(store, {2}));
  insert(5, CacheType::system);  // 1 assistant ≥ 1 user
  EXPECT_FALSE(has(store, {4}));
  insert(6, CacheType::system);  // 0 assistant, 1 user < 3 system
  EXPECT_FALSE(has(store, {1}));
  const auto stats = store.stats_by_type();
  EXPECT_EQ(stats.at(CacheType::assistant).sequences, 0u);
  EXPECT_EQ(stats.at(CacheType::user).sequences, 1u);
  EXPECT_EQ(stats.at(CacheType::system).sequences, 2u);
  EXPECT_EQ(stats.at(CacheType::system).bytes, 2 * bytes_of(1));
}

TEST(LRUPromptCache, T3TheSameKeyIsReplacedTypeAndBytesIncluded) {
  LRUPromptCache store;
  store.insert_cache("m", Tokens{1, 2}, holding({1, 2}, 1), CacheType::user);
  store.insert_cache("m", Tokens{1, 2}, holding({1, 2}, 3), CacheType::system);
  EXPECT_EQ(store.size(), 1u);
  EXPECT_EQ(store.nbytes(), bytes_of(3));
  EXPECT_EQ(store.stats_by_type().at(CacheType::user).sequences, 0u);
  EXPECT_EQ(store.stats_by_type().at(CacheType::user).bytes, 0u);
  EXPECT_EQ(store.stats_by_type().at(CacheType::system).bytes, bytes_of(3));
}

TEST(LRUPromptCache, T3TrimToHoldsBothNumbers) {
  LRUPromptCache store;
  for (int i = 0; i < 6; ++i) store.insert_cache("m", Tokens{i}, holding({i}));
  store.trim_to(std::nullopt, std::nullopt);
  EXPECT_EQ(store.size(), 6u);
  store.trim_to(4);
  EXPECT_EQ(store.size(), 4u);
  EXPECT_FALSE(has(store, {1}));
  store.trim_to(std::nullopt, bytes_of(2));
  EXPECT_EQ(store.size(), 2u);
  EXPECT_TRUE(has(store, {5}));
  store.trim_to(std::nullopt, 0);
  EXPECT_EQ(store.size(), 0u);
  EXPECT_EQ(store.nbytes(), 0u);
}

TEST(LRUPromptCache, T3X5AnEntryIsAsLongAsItsKeyInEveryLayer) {
  LRUPromptCache store;
  store.insert_cache("m", Tokens{1}, holding({1}));
  EXPECT_EQ(error_of([&] {
              store.insert_cache("m", Tokens{1, 2, 3}, holding({1, 2}));
            }).substr(0, 19),
            "failed_precondition");
  PromptCache uneven = holding({1, 2, 3});
  uneven[1].trim(1);
  const std::string error = error_of([&] { store.insert_cache("m", Tokens{1, 2, 3}, std::move(uneven)); });
  EXPECT_EQ(error.substr(0, 19), "failed_precondition");
  EXPECT_NE(error.find("layer 1"), std::string::npos) << error;
  EXPECT_EQ(store.size(), 1u);
  EXPECT_EQ(store.nbytes(), bytes_of(1));
  EXPECT_TRUE(has(store, {1}));
}

TEST(LRUPromptCache, T3AHitNeverChangesTheEntryAndCopiesNoRows) {
  LRUPromptCache store;
  const Tokens tokens = range(0, 40);
  store.insert_cache("m", tokens, holding(tokens, 64));
  for (const int length : {40, 30, 41}) {
    Tokens query = range(0, length);
    query.back() = 500;
    const std::size_t before = active_bytes();
    FetchedPromptCache fetched = store.fetch_nearest_cache("m", query);
    EXPECT_EQ(active_bytes(), before);
    append(*fetched.cache, {600, 601, 602}, {.heads = 1, .key_size = 64, .value_size = 64});
    fetched.cache->eval();
    trim_prompt_cache(*fetched.cache, 20);
    append(*fetched.cache, {700}, {.heads = 1, .key_size = 64, .value_size = 64});
    fetched.cache->eval();
    EXPECT_EQ(reused(store, range(0, 41)), tokens);
    EXPECT_EQ(store.nbytes(), bytes_of(64));
  }
}

TEST(LRUPromptCache, T3WhatFetchGaveOutlivesTheStore) {
  std::optional<PromptCache> cache;
  {
    LRUPromptCache store;
    store.insert_cache("m", range(0, 5), holding(range(0, 5)));
    cache = std::move(store.fetch_nearest_cache("m", range(0, 9)).cache);
    store.trim_to(0);
  }
  EXPECT_EQ(tokens_in(*cache), range(0, 5));
}

// An array that is not evaluated belongs to the thread that built it, so the store evaluates what it takes.
TEST(LRUPromptCache, T4X9EntriesMayBeUsedOnOtherThreads) {
  LRUPromptCache store;
  std::thread([&] { store.insert_cache("m", range(0, 6), holding(range(0, 6))); }).join();
  std::optional<PromptCache> fetched;
  std::thread([&] { fetched = std::move(store.fetch_nearest_cache("m", Tokens{0, 1, 2, 9}).cache); }).join();
  std::vector<int> seen;
  std::thread([&] {
    append(*fetched, {50}, {.heads = 1, .key_size = 1, .value_size = 1});
    seen = tokens_in(*fetched);
  }).join();
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 50}));
}

}  // namespace
}  // namespace reprise
