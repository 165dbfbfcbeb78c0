#include "reprise/cache/batch_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "tests/cache/batch_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// Rows of lengths 2, 5 and 3.
const TokenRows kPrompts = {range(10, 12), range(20, 25), range(30, 33)};

BatchKVCache filled(const TokenRows& tokens) {
  BatchKVCache cache(paddings(tokens));
  append_batch(cache, left_padded(tokens));
  return cache;
}

TokenRows grown(TokenRows tokens, const std::vector<int>& next) {
  for (std::size_t row = 0; row < tokens.size(); ++row) tokens[row].push_back(next[row]);
  return tokens;
}

std::string code_of(const std::string& error) { return error.substr(0, error.find(':')); }

std::size_t capacity(const BatchKVCache& cache) {
  return cache.nbytes() / (static_cast<std::size_t>(cache.batch_size()) * 2 * 8 * 4);
}

TEST(BatchKVCache, B1ANewOneIsEmptyAndItsPaddingIsStillToCome) {
  BatchKVCache cache({3, 0});
  EXPECT_EQ(cache.class_name(), "BatchKVCache");
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.positions(), (std::vector<int>{-3, 0}));
  EXPECT_EQ(cache.idx(), 0);
  EXPECT_EQ(cache.trim(2), 0);
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{3, 0}));
  EXPECT_EQ(code_of(error_of([&] { cache.keys_and_values(); })), "failed_precondition");
  EXPECT_EQ(code_of(error_of([] { BatchKVCache({1, -1}); })), "invalid_argument");
}

TEST(BatchKVCache, B1UpdatesGrowAsKVCacheDoesAndShowPaddingColumns) {
  BatchKVCache cache = filled(kPrompts);
  expect_holds(cache, kPrompts);
  const auto seen = std::get<DenseKV>(append_batch(cache, {{12}, {25}, {33}}));
  EXPECT_EQ(seen.keys.shape(), (mx::Shape{3, 2, 6, 4}));
  EXPECT_EQ(tokens_of(row_of(seen, 0).keys), (std::vector<int>{kFiller, kFiller, kFiller, 10, 11, 12}));
  expect_holds(cache, grown(kPrompts, {12, 25, 33}));
  EXPECT_EQ(capacity(cache), 256u);
  append_batch(cache, TokenRows(3, range(100, 351)));
  EXPECT_EQ(capacity(cache), 6u + 256u);
}

TEST(BatchKVCache, B2LeftPaddingIsAddedWhileEmptyOnly) {
  BatchKVCache cache({1, 0});
  cache.prepare({.left_padding = {1, 2}});
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{2, 2}));
  EXPECT_EQ(cache.positions(), (std::vector<int>{-2, -2}));
  append_batch(cache, {{kFiller, kFiller, 7}, {kFiller, kFiller, 8}});
  expect_holds(cache, {{7}, {8}});
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.left_padding = {0, 0}}); })), "failed_precondition");
  expect_holds(cache, {{7}, {8}});
}

TEST(BatchKVCache, B2CountsThatDoNotFitAreRefusedAndNothingIsAnnounced) {
  BatchKVCache cache({0, 0});
  const std::vector<BatchPrompt> wrong = {{.left_padding = {1}},
                                          {.left_padding = {1, -1}},
                                          {.lengths = {1, 2, 3}},
                                          {.left_padding = {1, 1}, .right_padding = {0, -1}},
                                          {.right_padding = {1, 1, 1}}};
  for (const BatchPrompt& prompt : wrong) {
    EXPECT_EQ(code_of(error_of([&] { cache.prepare(prompt); })), "invalid_argument");
    EXPECT_EQ(cache.left_padding(), (std::vector<int>{0, 0}));
    EXPECT_TRUE(cache.right_padding().empty());
  }
}

TEST(BatchKVCache, B3FinalizeMakesRightPaddedRowsEndTogether) {
  for (const int columns : {5, 256}) {  // 256: no slack behind the rows
    const TokenRows prompts = {range(10, 12), range(1000, 1000 + columns), range(30, 33)};
    BatchKVCache cache({0, 0, 0});
    cache.prepare({.lengths = {2, columns, 3}, .right_padding = paddings(prompts)});
    append_batch(cache, right_padded(prompts));
    EXPECT_EQ(cache.positions(), std::vector<int>(3, columns));
    cache.finalize();
    expect_holds(cache, prompts);
    EXPECT_TRUE(cache.right_padding().empty());
    cache.finalize();
    append_batch(cache, {{12}, {2000}, {33}});
    expect_holds(cache, grown(prompts, {12, 2000, 33}));
  }
}

TEST(BatchKVCache, B3APromptMayComeInChunksAndAfterAHistory) {
  BatchKVCache cache = filled({{1}, {2, 3}, {4}});
  cache.prepare({.right_padding = paddings(kPrompts)});
  const TokenRows padded = right_padded(kPrompts);
  for (const auto& [begin, end] : {std::pair(0, 3), std::pair(3, 5)}) {
    TokenRows chunk;
    for (const auto& row : padded) chunk.emplace_back(row.begin() + begin, row.begin() + end);
    append_batch(cache, chunk);
  }
  cache.finalize();
  expect_holds(cache, {{1, 10, 11}, {2, 3, 20, 21, 22, 23, 24}, {4, 30, 31, 32}});
  EXPECT_EQ(cache.idx(), 7);
}

TEST(BatchKVCache, B3NoPaddingAtAllLeavesNothingToDo) {
  BatchKVCache cache({0, 0});
  cache.prepare({.right_padding = {0, 0}});
  EXPECT_TRUE(cache.right_padding().empty());
  append_batch(cache, {{1}, {2}});
  cache.finalize();
  expect_holds(cache, {{1}, {2}});
}

TEST(BatchKVCache, B3ARowOfLessThanItsPaddingEndsWithNoTokens) {
  BatchKVCache cache({0, 0});
  cache.prepare({.right_padding = {9, 1}});
  append_batch(cache, {{1, 2}, {3, kFiller}});
  cache.finalize();
  expect_holds(cache, {{}, {3}});
}

TEST(BatchKVCache, B4TrimPastAShortRowLeavesItWithNoTokens) {
  BatchKVCache cache = filled(kPrompts);
  EXPECT_EQ(cache.trim(3), 3);
  expect_holds(cache, {{}, {20, 21}, {}});
  append_batch(cache, {{40}, {41}, {42}});
  expect_holds(cache, {{40}, {20, 21, 41}, {42}});
}

TEST(BatchKVCache, Z8TrimForgetsTheLastColumnsOfAllRows) {
  for (const int n : {0, 1, 4, 5, 14}) {
    BatchKVCache cache = filled({range(0, 5), range(10, 15)});
    const int trimmed = std::min(n, 5);
    EXPECT_EQ(cache.trim(n), trimmed);
    expect_holds(cache, {range(0, 5 - trimmed), range(10, 15 - trimmed)});
    EXPECT_FALSE(cache.empty());
  }
  BatchKVCache cache = filled(kPrompts);
  EXPECT_EQ(error_of([&] { cache.trim(-1); }),
            "invalid_argument: [BatchKVCache::trim] n must not be negative, but got -1");
  expect_holds(cache, kPrompts);
}

TEST(BatchKVCache, B5FilterChoosesReordersAndRepeatsRowsAndDropsTheirCommonPadding) {
  BatchKVCache cache = filled(kPrompts);
  cache.filter({2, 0, 2});
  expect_holds(cache, {kPrompts[2], kPrompts[0], kPrompts[2]});
  EXPECT_EQ(cache.idx(), 3);
  EXPECT_EQ(capacity(cache), 254u);
  append_batch(cache, {{1}, {2}, {3}});
  expect_holds(cache, grown({kPrompts[2], kPrompts[0], kPrompts[2]}, {1, 2, 3}));
  for (const std::vector<int>& rows : {std::vector<int>{0, 3}, std::vector<int>{-1}}) {
    EXPECT_EQ(code_of(error_of([&] { cache.filter(rows); })), "invalid_argument");
  }
  expect_holds(cache, grown({kPrompts[2], kPrompts[0], kPrompts[2]}, {1, 2, 3}));
}

TEST(BatchKVCache, B5BeforeAnyUpdatePaddingStaysToCome) {
  BatchKVCache cache({2, 3, 0});
  cache.filter({1, 0});
  EXPECT_EQ(cache.idx(), 0);
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{3, 2}));
  EXPECT_EQ(cache.positions(), (std::vector<int>{-3, -2}));
  expect_mask(cache, 4, {});
  append_batch(cache, {{kFiller, kFiller, kFiller, 5}, {kFiller, kFiller, 6, 7}});
  expect_holds(cache, {{5}, {6, 7}});
}

TEST(BatchKVCache, B5WhileRightPaddedThePendingPaddingIsFilteredToo) {
  BatchKVCache cache({0, 0, 0});
  cache.prepare({.right_padding = paddings(kPrompts)});
  append_batch(cache, right_padded(kPrompts));
  cache.filter({2, 0});
  EXPECT_EQ(cache.right_padding(), (std::vector<int>{2, 3}));
  cache.finalize();
  expect_holds(cache, {kPrompts[2], kPrompts[0]});
}

TEST(BatchKVCache, B5ABatchOfNoRowsGoesOnAndCanBeExtended) {
  BatchKVCache cache = filled(kPrompts);
  cache.filter({});
  EXPECT_EQ(cache.batch_size(), 0);
  EXPECT_EQ(cache.idx(), 0);
  EXPECT_EQ(cache.nbytes(), 0u);
  expect_mask(cache, 2, {});
  const auto restored = BatchKVCache::from_state(cache.saved_state());
  EXPECT_EQ(restored->batch_size(), 0);
  const Rows none = batch_rows({}, {}, 2);
  cache.update_and_fetch(none.keys, none.values);
  cache.finalize();
  EXPECT_EQ(cache.trim(5), 2);
  EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{1}}); })), "invalid_argument");
  cache.extend(filled(kPrompts));
  restored->extend(filled({{1}, {2}}));
  append_batch(cache, {{12}, {25}, {33}});
  append_batch(*restored, {{3}, {4}});
  expect_holds(cache, grown(kPrompts, {12, 25, 33}));
  expect_holds(*restored, {{1, 3}, {2, 4}});
}

TEST(BatchKVCache, B6EmptyAndFilledOnesOfOneAndThreeRowsExtendEachOther) {
  const TokenRows three = kPrompts, one = {{7, 8, 9}}, none_three(3), none_one(1);
  const std::vector<TokenRows> kinds = {three, one, none_three, none_one};
  const auto make = [](const TokenRows& tokens) {
    return paddings(tokens) == std::vector<int>(tokens.size(), 0) && tokens[0].empty()
               ? BatchKVCache(std::vector<int>(tokens.size(), 0))
               : filled(tokens);
  };
  for (const TokenRows& left : kinds) {
    for (const TokenRows& right : kinds) {
      BatchKVCache cache = make(left);
      const BatchKVCache other = make(right);
      const State before = other.state();
      cache.extend(other);
      EXPECT_TRUE(identical(other.state(), before));
      TokenRows all = left;
      all.insert(all.end(), right.begin(), right.end());
      expect_holds(cache, all);
      EXPECT_EQ(cache.empty(), left[0].empty() && right[0].empty());

      // A right-padded prompt for all of them.
      TokenRows prompts;
      for (int row = 0; row < static_cast<int>(all.size()); ++row) prompts.push_back(range(50, 51 + (row * 2) % 5));
      cache.prepare({.right_padding = paddings(prompts)});
      append_batch(cache, right_padded(prompts));
      cache.finalize();
      for (std::size_t row = 0; row < all.size(); ++row) {
        all[row].insert(all[row].end(), prompts[row].begin(), prompts[row].end());
      }
      expect_holds(cache, all);
    }
  }
}

TEST(BatchKVCache, B6TheCapacityIsTheLargerAndALongerSlackIsCut) {
  BatchKVCache cache = filled({range(0, 260)});
  EXPECT_EQ(capacity(cache), 512u);
  cache.trim(258);
  cache.extend(filled({range(10, 15)}));  // 2 and 5 tokens, 512 and 256 columns
  EXPECT_EQ(capacity(cache), 512u);
  expect_holds(cache, {{0, 1}, range(10, 15)});
  cache.extend(cache);
  expect_holds(cache, {{0, 1}, range(10, 15), {0, 1}, range(10, 15)});
}

TEST(BatchKVCache, B6PendingPaddingOfEitherSideIsKept) {
  BatchKVCache cache({0, 0}), other({0});
  cache.prepare({.right_padding = {1, 0}});
  append_batch(cache, {{1, kFiller}, {2, 3}});
  append_batch(other, {{4, 5, 6}});
  other.extend(cache);
  other.finalize();
  expect_holds(other, {{4, 5, 6}, {1}, {2, 3}});
}

TEST(BatchKVCache, B6WhatDoesNotFitIsRefusedAndNothingChanges) {
  BatchKVCache cache = filled(kPrompts);
  const State before = cache.state();
  BatchKVCache heads({0}), half({0});
  append_batch(heads, {{1}}, {.heads = 1});
  append_batch(half, {{1}}, {.dtype = mx::float16});
  const KVCache single;
  const auto quantized = BatchKVCache({0}).to_quantized(32, 8);
  const std::vector<const LayerCache*> others = {&heads, &half, &single, quantized.get()};
  for (const LayerCache* other : others) {
    EXPECT_EQ(code_of(error_of([&] { cache.extend(*other); })), "invalid_argument");
    EXPECT_TRUE(identical(cache.state(), before));
  }
}

TEST(BatchKVCache, B7ExtractGivesTheRowsOwnTokens) {
  const BatchKVCache cache = filled(kPrompts);
  for (int row = 0; row < 3; ++row) {
    const auto extracted = cache.extract(row);
    EXPECT_EQ(extracted->class_name(), "KVCache");
    auto& single = dynamic_cast<KVCache&>(*extracted);
    const auto& tokens = kPrompts[static_cast<std::size_t>(row)];
    EXPECT_EQ(tokens_of(single.keys_and_values()), tokens);
    EXPECT_EQ(single.position(), static_cast<int>(tokens.size()));
    EXPECT_EQ(single.nbytes(), tokens.size() * 2 * 8 * 4);
  }
  for (const int row : {-1, 3}) {
    EXPECT_EQ(code_of(error_of([&] { cache.extract(row); })), "invalid_argument");
  }
}

TEST(BatchKVCache, B7ARowOfAnEmptyBatchIsAnEmptyCache) {
  const auto extracted = BatchKVCache({2, 0}).extract(0);
  auto& single = dynamic_cast<KVCache&>(*extracted);
  EXPECT_TRUE(single.empty());
  EXPECT_EQ(single.position(), 0);
  append(single, range(0, 3));
  EXPECT_EQ(tokens_of(single.keys_and_values()), range(0, 3));
}

TEST(BatchKVCache, B9M6TheMaskIsAlwaysAnArrayCausalWithPaddingAndWindow) {
  for (const std::optional<int> window : {std::optional<int>(), std::optional<int>(1), std::optional<int>(3)}) {
    for (const int N : {1, 2, 6}) {
      expect_mask(BatchKVCache({3, 0, 1}), N, window);
      expect_mask(filled(kPrompts), N, window);
      BatchKVCache trimmed = filled(kPrompts);
      trimmed.trim(3);
      expect_mask(trimmed, N, window);
    }
  }
  const BatchKVCache cache = filled(kPrompts);
  EXPECT_NE(error_of([&] { cache.make_mask(0); }), "nothing");
  EXPECT_NE(error_of([&] { cache.make_mask(1, {.window = 0}); }), "nothing");
}

}  // namespace
}  // namespace reprise
