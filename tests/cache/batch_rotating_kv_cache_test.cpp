#include "reprise/cache/batch_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

using Singles = std::vector<std::unique_ptr<internal::RingCache>>;

// Row r's tokens begin at 5000 + 1000 r.
std::vector<int> of_row(int row, int begin, int end) {
  return range(kFirstToken + 1000 * row + begin, kFirstToken + 1000 * row + end);
}

// One ring a row that got these chunks.
Singles singles(int max_size, int keep, const std::vector<std::vector<int>>& chunks) {
  Singles result;
  for (std::size_t row = 0; row < chunks.size(); ++row) {
    result.push_back(std::make_unique<RotatingKVCache>(max_size, keep));
    int at = 0;
    for (const int length : chunks[row]) {
      append(*result.back(), of_row(static_cast<int>(row), at, at + length), kRingShape);
      at += length;
    }
  }
  return result;
}

// The next `counts` tokens of each row, in one update of `columns`.
void go_on(RingPair& pair, const std::vector<int>& counts, int columns) {
  TokenRows tokens;
  for (std::size_t row = 0; row < counts.size(); ++row) {
    const int at = *pair.solos[row]->position();
    tokens.push_back(of_row(static_cast<int>(row), at, at + counts[row]));
  }
  ASSERT_NO_FATAL_FAILURE(update_and_compare(pair, tokens, columns));
}

void decode(RingPair& pair, int steps) {
  for (int i = 0; i < steps; ++i) ASSERT_NO_FATAL_FAILURE(go_on(pair, std::vector<int>(pair.solos.size(), 1), 1));
}

RingPair left_padded_pair(int max_size, const std::vector<int>& padding, int columns, int keep = 0) {
  RingPair pair{std::make_unique<BatchRotatingKVCache>(max_size, padding, keep), {}};
  TokenRows tokens;
  for (std::size_t row = 0; row < padding.size(); ++row) {
    pair.solos.push_back(std::make_unique<RotatingKVCache>(max_size, keep));
    tokens.push_back(of_row(static_cast<int>(row), 0, columns - padding[row]));
  }
  update_and_compare(pair, tokens, columns, {}, kRingShape, padding);
  return pair;
}

std::string code_of(const std::string& error) { return error.substr(0, error.find(':')); }

TEST(BatchRotatingKVCache, ANewOneIsEmpty) {
  BatchRotatingKVCache cache(8, {2, 0}, 3);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.batch_size(), 2);
  EXPECT_FALSE(cache.position());
  EXPECT_EQ(cache.positions(), (std::vector<int>{-2, 0}));
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{2, 0}));
  EXPECT_TRUE(identical(std::get<mx::array>(cache.offset()), mx::array({-2, 0}, mx::int32)));
  EXPECT_EQ(cache.trim(3), 0);
  EXPECT_EQ(cache.class_name(), "BatchRotatingKVCache");
  EXPECT_EQ(code_of(error_of([&] { cache.keys_and_values(); })), "failed_precondition");
}

TEST(BatchRotatingKVCache, ImpossibleSizesAreRefused) {
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(0, {0}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(4, {0}, 4); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(4, {0}, -1); })), "invalid_argument");
  EXPECT_EQ(error_of([] {
              BatchRotatingKVCache(4, {0, -1});
            }),
            "invalid_argument: [BatchRotatingKVCache] left_padding must not be negative, but got -1");
}

TEST(BatchRotatingKVCache, W1AChunkComesBackInTemporalOrderBehindWhatItsFirstTokenSees) {
  RingPair pair = left_padded_pair(8, {4, 0}, 10);
  EXPECT_EQ(pair.batch->idx(), 10);
  ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
  EXPECT_TRUE(pair.batch->rotated());
  ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 3}, 3));
  EXPECT_FALSE(pair.batch->rotated());
  EXPECT_EQ(pair.batch->idx(), 10);
  EXPECT_EQ(columns_of(pair.batch->keys_and_values(), 0), of_row(0, 2, 12));
  EXPECT_EQ(columns_of(pair.batch->keys_and_values(), 1), of_row(1, 6, 16));
}

TEST(BatchRotatingKVCache, W2OneTokenReplacesTheOldestInItsPlace) {
  RingPair pair = left_padded_pair(4, {1, 0}, 3);
  ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
  EXPECT_TRUE(pair.batch->rotated());
  EXPECT_EQ(pair.batch->idx(), 2);
  EXPECT_EQ(pair.batch->left_padding(), (std::vector<int>{-1, -2}));
  EXPECT_EQ(columns_of(pair.batch->keys_and_values(), 1),
            (std::vector<int>{kFirstToken + 1004, kFirstToken + 1005, kFirstToken + 1002, kFirstToken + 1003}));
}

TEST(BatchRotatingKVCache, W3RightPaddingPushesNoTokenOut) {
  for (const int keep : {0, 3}) {
    RingPair pair = merged(singles(8, keep, {{12, 1, 1}, {5}, {1}}));
    pair.batch->prepare({.lengths = {6, 2, 0}, .right_padding = {0, 4, 6}});
    ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 2, 0}, 3));
    ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 0, 0}, 3));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    pair.batch->finalize();
    EXPECT_EQ(pair.batch->positions(), (std::vector<int>{20, 7, 1}));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    ASSERT_NO_FATAL_FAILURE(decode(pair, 20));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
  }
}

TEST(BatchRotatingKVCache, W3OneTokenAmongRightPaddingIsRefused) {
  BatchRotatingKVCache cache(8, {0, 0});
  append_batch(cache, {of_row(0, 0, 3), of_row(1, 0, 3)}, kRingShape);
  cache.prepare({.lengths = {1, 0}, .right_padding = {0, 1}});
  const State before = cache.state();
  EXPECT_EQ(code_of(error_of([&] { append_batch(cache, {{1}, {2}}, kRingShape); })), "failed_precondition");
  EXPECT_TRUE(identical(cache.state(), before));
  cache.finalize();
  append_batch(cache, {{1}, {2}}, kRingShape);
  EXPECT_EQ(cache.positions(), (std::vector<int>{4, 4}));
}

TEST(BatchRotatingKVCache, W3CountsThatDoNotFitAreRefused) {
  BatchRotatingKVCache cache(8, {0, 0});
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.left_padding = {1}}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.lengths = {1, -1}}); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.right_padding = {1, 0}}); })), "invalid_argument");
  append_batch(cache, {{1}, {2}}, kRingShape);
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.left_padding = {1, 0}}); })), "failed_precondition");
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{0, 0}));
}

TEST(BatchRotatingKVCache, W3LeftPaddingMayBeAnnouncedTwice) {
  RingPair pair{std::make_unique<BatchRotatingKVCache>(8, std::vector<int>{1, 0}), {}};
  pair.batch->prepare({.left_padding = {0, 2}});
  pair.batch->prepare({.left_padding = {1, 0}});
  EXPECT_EQ(pair.batch->left_padding(), (std::vector<int>{2, 2}));
  pair.solos = singles(8, 0, {{}, {}});
  ASSERT_NO_FATAL_FAILURE(update_and_compare(pair, {of_row(0, 0, 3), of_row(1, 0, 3)}, 5, {}, kRingShape, {2, 2}));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 9));
}

TEST(BatchRotatingKVCache, W4PaddedRowsOnAWrappedRingSeeTheirOldestToken) {
  // mlx-lm's mask hides one token of the padded row here.
  RingPair pair = left_padded_pair(8, {4}, 8);
  ASSERT_NO_FATAL_FAILURE(decode(pair, 1));
  const Mask mask = pair.batch->make_mask(2);
  const KeysValues all = append_batch(*pair.batch, {of_row(0, 5, 7)}, kRingShape);
  EXPECT_EQ(seen(all, mask, 2, 0), (TokenRows{of_row(0, 0, 6), of_row(0, 0, 7)}));
}

TEST(BatchRotatingKVCache, M7MaskIsAnArrayForEveryWindowAndRefusesNone) {
  RingPair pair = left_padded_pair(8, {3, 0}, 5);
  for (int step = 0; step < 20; ++step) {
    for (const int window : {1, 2, 7, 8, 20}) {
      RingPair copy = pair.fork();
      ASSERT_NO_FATAL_FAILURE(
          update_and_compare(copy, {of_row(0, step + 2, step + 3), of_row(1, step + 5, step + 6)}, 1, window));
      copy = pair.fork();
      ASSERT_NO_FATAL_FAILURE(
          update_and_compare(copy, {of_row(0, step + 2, step + 6), of_row(1, step + 5, step + 9)}, 4, window));
    }
    ASSERT_NO_FATAL_FAILURE(decode(pair, 1));
  }
  const mx::array one = std::get<mx::array>(pair.batch->make_mask(1));
  EXPECT_EQ(one.shape(), (mx::Shape{2, 1, 1, 8}));
  EXPECT_EQ(std::get<mx::array>(pair.batch->make_mask(3)).shape(), (mx::Shape{2, 1, 3, 10}));
  EXPECT_EQ(code_of(error_of([&] { pair.batch->make_mask(0); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { pair.batch->make_mask(1, {.window = 0}); })), "invalid_argument");
}

TEST(BatchRotatingKVCache, W5Z8TrimmingIsAsIfTheTokensHadNotCome) {
  for (const int keep : {0, 5}) {
    for (const int n : {0, 1, 5, 6, 14}) {
      RingPair pair = left_padded_pair(8, {3, 0}, 6, keep);
      ASSERT_TRUE(pair.batch->is_trimmable());
      EXPECT_EQ(pair.batch->max_trim(), 6);
      EXPECT_EQ(pair.batch->trim(n), std::min(n, 6));
      for (const auto& solo : pair.solos) solo->trim(n);
      EXPECT_EQ(pair.batch->positions(), (std::vector<int>{std::max(0, 3 - n), std::max(0, 6 - n)}));
      EXPECT_EQ(pair.batch->length(), 6 - std::min(n, 6));
      ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
      ASSERT_NO_FATAL_FAILURE(go_on(pair, {2, 2}, 2));
      ASSERT_NO_FATAL_FAILURE(decode(pair, 12));
    }
  }
}

TEST(BatchRotatingKVCache, W5Z8NothingIsTrimmedOnceARowMayHaveLostATokenOrForANegativeNumber) {
  RingPair full = left_padded_pair(8, {3, 0}, 8);
  RingPair short_rows = merged(singles(8, 0, {{20, 1}, {3}}));
  for (const RingPair* pair : {&full, &short_rows}) {
    const State before = pair->batch->state();
    EXPECT_FALSE(pair->batch->is_trimmable());
    EXPECT_EQ(pair->batch->max_trim(), 0);
    EXPECT_EQ(pair->batch->trim(1), 0);
    EXPECT_TRUE(identical(pair->batch->state(), before));
    EXPECT_EQ(code_of(error_of([&] { pair->batch->trim(-1); })), "invalid_argument");
  }
}

TEST(BatchRotatingKVCache, W6FilterSelectsReordersAndRepeatsRowsAlsoWhileRightPadded) {
  RingPair pair = merged(singles(8, 2, {{3}, {11}, {}}));
  pair.batch->prepare({.lengths = {4, 1, 2}, .right_padding = {0, 3, 2}});
  ASSERT_NO_FATAL_FAILURE(go_on(pair, {4, 1, 2}, 4));
  pair.batch->filter({2, 0, 2});
  Singles solos;
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
    RingPair pair = merged(singles(8, keep, {{12}, {3}}));
    pair.batch->filter({});
    EXPECT_EQ(pair.batch->batch_size(), 0);
    EXPECT_EQ(pair.batch->size(), 0);
    const Rows none = batch_rows({}, kRingShape, 1);
    pair.batch->update_and_fetch(none.keys, none.values);
    EXPECT_EQ(std::get<mx::array>(pair.batch->make_mask(1)).shape(0), 0);
    RingPair other = merged(singles(8, keep, {{4}, {9, 1}}));
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
        RingPair pair = merged(singles(8, keep, {first, first, {2}}));
        RingPair other = merged(singles(8, keep, {first, first, {2}, second}));
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
            singles(8, 0, std::vector<std::vector<int>>(static_cast<std::size_t>(empty_rows)))};
        RingPair filled =
            merged(singles(8, 0, std::vector<std::vector<int>>(static_cast<std::size_t>(filled_rows), {5})));
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
  RingPair pair = merged(singles(8, 2, {{5}, {3}}));
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
          Singles one;
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
    RingPair pair = merged(singles(8, keep, {{}, {1}, {7}, {8}, {8, 1}, {20, 1, 1, 1, 1, 1, 1}, {26}, {3, 12}}));
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
  RingPair pair = merged(singles(8, 4, {{1}, {3}, {30}}));
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
  const auto refused = [](const Singles& caches) {
    std::vector<const LayerCache*> all;
    for (const auto& cache : caches) all.push_back(cache.get());
    return code_of(error_of([&] { merge_caches(all); })) == "invalid_argument";
  };
  Singles sizes = singles(8, 2, {{3}});
  sizes.push_back(std::make_unique<RotatingKVCache>(9, 2));
  EXPECT_TRUE(refused(sizes));
  Singles keeps = singles(8, 2, {{3}});
  keeps.push_back(std::make_unique<RotatingKVCache>(8, 1));
  EXPECT_TRUE(refused(keeps));
  Singles rows;
  rows.push_back(std::make_unique<RotatingKVCache>(8));
  append_batch(*rows[0], {{1}, {2}}, kRingShape);
  EXPECT_TRUE(refused(rows));
  Singles dtypes = singles(8, 0, {{3}, {}});
  append(*dtypes[1], {7}, {.heads = 1, .dtype = mx::float16});
  EXPECT_TRUE(refused(dtypes));
  EXPECT_TRUE(merged(singles(8, 2, {{}, {}})).batch->empty());
}

TEST(BatchRotatingKVCache, Z2ArraysHandedOutAndTakenAreValues) {
  RingPair pair = left_padded_pair(4, {1, 0}, 4, 1);
  std::vector<mx::array> given, copies;
  const auto remember = [&](const mx::array& array) {
    given.push_back(array);
    copies.push_back(mx::copy(array));
    mx::eval(copies.back(), given.back());
  };
  for (int step = 0; step < 8; ++step) {
    const Rows added =
        batch_rows({of_row(0, step, step + 1 + step % 3), of_row(1, step, step + 1 + step % 3)}, kRingShape);
    remember(added.keys);
    remember(std::get<mx::array>(pair.batch->offset()));
    remember(std::get<mx::array>(pair.batch->make_mask(1 + step % 3)));
    remember(std::get<DenseKV>(pair.batch->update_and_fetch(added.keys, added.values)).keys);
    remember(*(*pair.batch->state().as_list())[1].as_array());
  }
  for (std::size_t i = 0; i < given.size(); ++i) EXPECT_TRUE(identical(given[i], copies[i])) << i;
}

TEST(BatchRotatingKVCache, Z3Z5MismatchesThrowAndChangeNothing) {
  RingPair pair = left_padded_pair(8, {1, 0}, 5, 2);
  const State before = pair.batch->state();
  const auto refused = [&](const Rows& added) {
    return code_of(error_of([&] { pair.batch->update_and_fetch(added.keys, added.values); })) == "invalid_argument";
  };
  EXPECT_TRUE(refused(batch_rows({{1}}, kRingShape)));
  EXPECT_TRUE(refused(batch_rows({{1}, {2}}, {.heads = 2})));
  EXPECT_TRUE(refused(batch_rows({{1}, {2}}, {.heads = 1, .key_size = 5})));
  EXPECT_TRUE(refused(batch_rows({{1}, {2}}, {.heads = 1, .dtype = mx::float16})));
  EXPECT_TRUE(identical(pair.batch->state(), before));
  EXPECT_EQ(columns_of(append_batch(*pair.batch, {{}, {}}, kRingShape), 1),
            columns_of(pair.batch->keys_and_values(), 1));
  EXPECT_TRUE(identical(pair.batch->state(), before));
  BatchRotatingKVCache empty(8, {0, 0});
  EXPECT_EQ(code_of(error_of([&] { append_batch(empty, {{}, {}}, kRingShape); })), "invalid_argument");
  EXPECT_EQ(code_of(error_of([&] { append_batch(empty, {{1}}, kRingShape); })), "invalid_argument");
  ASSERT_NO_FATAL_FAILURE(decode(pair, 9));
}

TEST(BatchRotatingKVCache, P5ReloadedInTheMiddleOfAPaddedPromptItGoesOn) {
  for (const int keep : {0, 3}) {
    for (const bool saved : {false, true}) {
      RingPair pair = merged(singles(8, keep, {{14, 1}, {2}}));
      ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
      const auto reload = [&] {
        auto again = cache_from_state("BatchRotatingKVCache", saved ? pair.batch->saved_state() : pair.batch->state());
        again->set_extra_state(pair.batch->extra_state());
        pair.batch = as_ring_batch(std::move(again));
      };
      reload();
      ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
      pair.batch->prepare({.lengths = {5, 1}, .right_padding = {0, 4}});
      ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 1}, 3));
      reload();
      ASSERT_NO_FATAL_FAILURE(go_on(pair, {2, 0}, 2));
      reload();
      pair.batch->finalize();
      ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
      ASSERT_NO_FATAL_FAILURE(decode(pair, 12));
    }
  }
}

TEST(BatchRotatingKVCache, P5AReaderThatKnowsNoSinksSeesRowsWithoutThem) {
  RingPair pair = merged(singles(8, 3, {{14, 1}, {2}}));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 4));
  const auto plain = as_ring_batch(cache_from_state("BatchRotatingKVCache", pair.batch->saved_state()));
  const Mask mask = plain->make_mask(2);
  const KeysValues all = append_batch(*plain, {of_row(0, 19, 21), of_row(1, 6, 8)}, kRingShape);
  EXPECT_EQ(seen(all, mask, 2, 0)[0], of_row(0, 14, 20));
  EXPECT_EQ(seen(all, mask, 2, 1)[0], of_row(1, 3, 7));
}

TEST(BatchRotatingKVCache, P6DamagedStatesAreRefused) {
  RingPair pair = left_padded_pair(4, {1, 0}, 3, 1);
  ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
  const State::List good = *pair.batch->state().as_list();
  const auto refused = [&](std::size_t item, State value) {
    State::List items = good;
    items[item] = std::move(value);
    return code_of(error_of([&] { BatchRotatingKVCache::from_state(items); })) == "corrupt_data";
  };
  EXPECT_EQ(error_of([&] { BatchRotatingKVCache::from_state(good); }), "nothing");
  EXPECT_TRUE(refused(0, State()));
  EXPECT_TRUE(refused(1, mx::zeros({2, 1, 3, 4})));
  EXPECT_TRUE(refused(2, mx::array({1}, mx::int32)));
  EXPECT_TRUE(refused(2, mx::array({1, 1 << 30}, mx::int32)));
  EXPECT_TRUE(refused(3, mx::array({1, 2, 3}, mx::int32)));
  EXPECT_TRUE(refused(4, 0));
  EXPECT_TRUE(refused(4, 9));  // rotated, but narrower
  EXPECT_TRUE(refused(5, -1));
  EXPECT_TRUE(refused(6, 5));
  EXPECT_TRUE(refused(7, 1));

  const auto refused_extra = [&](const ExtraState& extra) {
    auto cache = BatchRotatingKVCache::from_state(good);
    const bool thrown = code_of(error_of([&] { cache->set_extra_state(extra); })) == "corrupt_data";
    return thrown && cache->keep() == 0 && identical(cache->state(), State(good));
  };
  EXPECT_TRUE(refused_extra({{"keep", std::int64_t{4}}}));
  EXPECT_TRUE(refused_extra({{"keep", std::int64_t{-1}}}));
  EXPECT_TRUE(refused_extra({{"keep", std::vector<int>{1}}}));
  EXPECT_TRUE(refused_extra({{"keep", std::int64_t{1}}, {"lengths", std::vector<int>{1}}}));
  EXPECT_TRUE(refused_extra({{"stored", std::vector<int>{1, 9}}}));
  EXPECT_TRUE(refused_extra({{"other", std::int64_t{1}}}));
}

TEST(BatchRotatingKVCache, P7TheLegacyPairRestores) {
  for (const int steps : {0, 3, 9}) {
    RingPair pair = left_padded_pair(8, {3, 0}, 5);
    ASSERT_NO_FATAL_FAILURE(decode(pair, steps));
    pair.batch =
        as_ring_batch(cache_from_legacy("BatchRotatingKVCache", pair.batch->legacy_state(), pair.batch->legacy_meta()));
    EXPECT_EQ(pair.batch->rotated(), steps == 9);
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    ASSERT_NO_FATAL_FAILURE(go_on(pair, {2, 2}, 2));
    ASSERT_NO_FATAL_FAILURE(decode(pair, 9));
  }
  BatchRotatingKVCache cache(8, {0});
  Meta::List meta = *cache.legacy_meta().as_list();
  meta[3] = Meta("false");
  EXPECT_EQ(code_of(error_of([&] { BatchRotatingKVCache::from_legacy(cache.legacy_state(), meta); })), "corrupt_data");
}

}  // namespace
}  // namespace reprise
