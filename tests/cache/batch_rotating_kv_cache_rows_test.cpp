// Rows join a rotating batch, leave it and come back out.
#include "reprise/cache/batch_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

using Rings = std::vector<std::unique_ptr<internal::RingCache>>;

TEST(BatchRotatingKVCache, W6FilterSelectsReordersAndRepeatsRowsAlsoWhileRightPadded) {
  RingPair pair = merged(ring_singles(8, 2, {{3}, {11}, {}}));
  pair.batch->prepare({.lengths = {4, 1, 2}, .right_padding = {0, 3, 2}});
  ASSERT_NO_FATAL_FAILURE(go_on(pair, {4, 1, 2}, 4));
  pair.batch->filter({2, 0, 2});
  Rings solos;
  for (const int row : {2, 0, 2}) solos.push_back(as_ring(pair.solos[static_cast<std::size_t>(row)]->fork()));
  pair.solos = std::move(solos);
  pair.batch->finalize();
  EXPECT_EQ(pair.batch->positions(), (std::vector<int>{2, 7, 2}));
  ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 10));
  EXPECT_EQ(code_of(error_of([&] { pair.batch->filter({3}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { pair.batch->filter({-1}); })), "invalid_argument");
  EXPECT_EQ(pair.batch->batch_size(), 3);
}

TEST(BatchRotatingKVCache, W6ABatchOfNoRowsTakesNewOnes) {
  for (const int keep : {0, 2}) {
    RingPair pair = merged(ring_singles(8, keep, {{12}, {3}}));
    pair.batch->filter({});
    EXPECT_EQ(pair.batch->batch_size(), 0);
    EXPECT_EQ(pair.batch->size(), 0);
    const Rows none = batch_rows({}, kRingShape, 1);
    pair.batch->update_and_fetch(none.keys, none.values);
    EXPECT_EQ(std::get<mx::array>(pair.batch->make_mask(1)).shape(0), 0);
    RingPair other = merged(ring_singles(8, keep, {{4}, {9, 1}}));
    pair.batch->extend(*other.batch);
    pair.solos = std::move(other.solos);
    ASSERT_NO_FATAL_FAILURE(decode(pair, 12));
  }
}

TEST(BatchRotatingKVCache, W7EveryPairOfFillStatesExtends) {
  const std::vector<std::vector<int>> states = {{}, {3}, {1, 1}, {8}, {8, 1}, {20}, {20, 1, 1, 1}};
  for (const int keep : {0, 3}) {
    for (const auto& first : states) {
      for (const auto& second : states) {
        RingPair pair = merged(ring_singles(8, keep, {first, first, {2}}));
        RingPair other = merged(ring_singles(8, keep, {first, first, {2}, second}));
        other.batch->filter({3});
        other.solos.erase(other.solos.begin(), other.solos.end() - 1);
        const State before = other.batch->state();
        pair.batch->extend(*other.batch);
        EXPECT_TRUE(identical(other.batch->state(), before));
        pair.solos.push_back(std::move(other.solos.front()));
        ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
        ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 3, 3, 3}, 3));
        ASSERT_NO_FATAL_FAILURE(decode(pair, 9));
      }
    }
  }
}

TEST(BatchRotatingKVCache, W7EmptyAndFilledBatchesExtendInBothOrders) {
  for (const int empty_rows : {1, 3}) {
    for (const int filled_rows : {1, 3}) {
      for (const bool empty_first : {true, false}) {
        RingPair empty{
            std::make_unique<BatchRotatingKVCache>(8, std::vector<int>(static_cast<std::size_t>(empty_rows))),
            ring_singles(8, 0, std::vector<std::vector<int>>(static_cast<std::size_t>(empty_rows)))};
        RingPair filled =
            merged(ring_singles(8, 0, std::vector<std::vector<int>>(static_cast<std::size_t>(filled_rows), {5})));
        RingPair& pair = empty_first ? empty : filled;
        RingPair& other = empty_first ? filled : empty;
        pair.batch->extend(*other.batch);
        for (auto& solo : other.solos) pair.solos.push_back(std::move(solo));
        ASSERT_EQ(pair.batch->batch_size(), empty_rows + filled_rows);

        std::vector<int> lengths(pair.solos.size(), 2), right(pair.solos.size(), 1);
        lengths[0] = 3;
        right[0] = 0;
        pair.batch->prepare({.lengths = lengths, .right_padding = right});
        ASSERT_NO_FATAL_FAILURE(go_on(pair, lengths, 3));
        pair.batch->finalize();
        ASSERT_NO_FATAL_FAILURE(decode(pair, 10));
      }
    }
  }
}

TEST(BatchRotatingKVCache, W7WhatDoesNotFitIsRefusedAndNothingChanges) {
  RingPair pair = merged(ring_singles(8, 2, {{5}, {3}}));
  const State before = pair.batch->state();
  const auto refused = [&](const LayerCache& other) {
    return code_of(error_of([&] { pair.batch->extend(other); })) == "invalid_argument";
  };
  BatchRotatingKVCache wider(8, {0}, 2);
  append_batch(wider, {{1}}, {.heads = 1, .key_size = 6});
  EXPECT_TRUE(refused(BatchRotatingKVCache(9, {0}, 2)));
  EXPECT_TRUE(refused(BatchRotatingKVCache(8, {0}, 1)));
  EXPECT_TRUE(refused(RotatingKVCache(8, 2)));
  EXPECT_TRUE(refused(wider));
  EXPECT_TRUE(identical(pair.batch->state(), before));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
}

TEST(BatchRotatingKVCache, W8ExtractGivesARowAloneThatGoesOn) {
  for (const int keep : {0, 3}) {
    for (const int steps : {0, 1, 4, 20}) {
      RingPair pair = left_padded_pair(8, {4, 0}, 6, keep);
      ASSERT_NO_FATAL_FAILURE(decode(pair, steps));
      ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
      for (const int row : {0, 1}) {
        const auto alone = pair.batch->extract(row);
        RingPair single = merged([&] {
          Rings one;
          one.push_back(as_ring(alone->fork()));
          return one;
        }());
        single.solos[0] = as_ring(pair.solos[static_cast<std::size_t>(row)]->fork());
        ASSERT_NO_FATAL_FAILURE(decode(single, 4));
        ASSERT_NO_FATAL_FAILURE(go_on(single, {5}, 5));
        ASSERT_NO_FATAL_FAILURE(decode(single, 4));
      }
    }
  }
}

TEST(BatchRotatingKVCache, W8ARowOfAnEmptyBatchIsAnEmptyRing) {
  const auto single = BatchRotatingKVCache(8, {0, 2}, 3).extract(1);
  EXPECT_TRUE(single->empty());
  EXPECT_EQ(single->position(), 0);
  EXPECT_EQ(dynamic_cast<const RotatingKVCache&>(*single).keep(), 3);
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(8, {0}).extract(1); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(8, {0}).extract(-1); })), "invalid_argument");
}

TEST(BatchRotatingKVCache, W9MergeTakesTheStoredRowsOfEveryFillState) {
  for (const int keep : {0, 1, 4, 7}) {
    RingPair pair = merged(ring_singles(8, keep, {{}, {1}, {7}, {8}, {8, 1}, {20, 1, 1, 1, 1, 1, 1}, {26}, {3, 12}}));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    EXPECT_EQ(pair.batch->keep(), keep);
    RingPair chunked = pair.fork();
    ASSERT_NO_FATAL_FAILURE(decode(pair, 18));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    ASSERT_NO_FATAL_FAILURE(go_on(chunked, std::vector<int>(8, 3), 3));
    ASSERT_NO_FATAL_FAILURE(go_on(chunked, std::vector<int>(8, 11), 11));
    ASSERT_NO_FATAL_FAILURE(decode(chunked, 9));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(chunked));
  }
}

TEST(BatchRotatingKVCache, W9SinksStayThoughRowsReachThemAtDifferentTimes) {
  RingPair pair = merged(ring_singles(8, 4, {{1}, {3}, {30}}));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 20));
  for (int row = 0; row < 3; ++row) {
    const std::vector<int> tokens = retained(*as_ring(pair.batch->extract(row)));
    const int end = *pair.solos[static_cast<std::size_t>(row)]->position();
    std::vector<int> expected = of_row(row, 0, 4);
    for (const int token : of_row(row, end - 4, end)) expected.push_back(token);
    EXPECT_EQ(tokens, expected);
  }
}

TEST(BatchRotatingKVCache, W9OnlyRingsOfOneKindMerge) {
  const auto refused = [](const Rings& caches) {
    std::vector<const LayerCache*> all;
    for (const auto& cache : caches) all.push_back(cache.get());
    return code_of(error_of([&] { merge_caches(all); })) == "invalid_argument";
  };
  Rings sizes = ring_singles(8, 2, {{3}});
  sizes.push_back(std::make_unique<RotatingKVCache>(9, 2));
  EXPECT_TRUE(refused(sizes));
  Rings keeps = ring_singles(8, 2, {{3}});
  keeps.push_back(std::make_unique<RotatingKVCache>(8, 1));
  EXPECT_TRUE(refused(keeps));
  Rings rows;
  rows.push_back(std::make_unique<RotatingKVCache>(8));
  append_batch(*rows[0], {{1}, {2}}, kRingShape);
  EXPECT_TRUE(refused(rows));
  Rings dtypes = ring_singles(8, 0, {{3}, {}});
  append(*dtypes[1], {7}, {.heads = 1, .dtype = mx::float16});
  EXPECT_TRUE(refused(dtypes));
  EXPECT_TRUE(merged(ring_singles(8, 2, {{}, {}})).batch->empty());
}

}  // namespace
}  // namespace reprise
