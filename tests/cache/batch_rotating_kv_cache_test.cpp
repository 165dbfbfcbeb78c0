#include "reprise/cache/batch_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

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
  // More than a file may say.
  EXPECT_EQ(code_of(error_of([] { BatchRotatingKVCache(4, {(1 << 29) + 1}); })), "invalid_argument");
  BatchRotatingKVCache cache(4, {1 << 29});
  EXPECT_EQ(code_of(error_of([&] { cache.prepare({.left_padding = {1}, .lengths = {}, .right_padding = {}}); })),
            "invalid_argument");
  append(cache, {1});
  EXPECT_NO_THROW(cache_from_state(cache.class_name(), cache.state()));
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
    RingPair pair = merged(ring_singles(8, keep, {{12, 1, 1}, {5}, {1}}));
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
  pair.solos = ring_singles(8, 0, {{}, {}});
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

// The second chunk moved filler before the tokens of row 1, so that it pushes none of them out.
TEST(BatchRotatingKVCache, W5Z8TrimmingSeveralChunksOfAPaddedPromptIsAsIfTheyHadNotCome) {
  for (const int keep : {0, 4}) {
    for (const int trimmed : {5, 8, 11}) {
      RingPair pair = merged(ring_singles(24, keep, {{4}, {1}}));
      const std::vector<int> lengths = {12, 3};
      pair.batch->prepare({.left_padding = {}, .lengths = lengths, .right_padding = {0, 9}});
      const auto feed = [&](internal::BatchRingCache& batch, int begin, int end) {
        TokenRows columns;
        for (int row = 0; row < 2; ++row) {
          columns.push_back(of_row(row, begin, std::clamp(lengths[static_cast<std::size_t>(row)], begin, end)));
        }
        const Rows added = batch_rows(right_padded(columns), kRingShape, end - begin);
        batch.update_and_fetch(added.keys, added.values);
      };
      auto straight = pair.batch->fork();
      feed(dynamic_cast<internal::BatchRingCache&>(*straight), 0, 12);
      batched(*straight)->finalize();

      feed(*pair.batch, 0, 4);
      feed(*pair.batch, 4, 8);
      feed(*pair.batch, 8, 12);
      auto reloaded = cache_from_state(pair.batch->class_name(), pair.batch->saved_state());
      reloaded->set_extra_state(pair.batch->extra_state());
      for (LayerCache* cache : {static_cast<LayerCache*>(pair.batch.get()), reloaded.get()}) {
        ASSERT_EQ(cache->trim(trimmed), trimmed);
        feed(dynamic_cast<internal::BatchRingCache&>(*cache), 12 - trimmed, 12);
        batched(*cache)->finalize();
        ASSERT_EQ(cache->positions(), straight->positions());
        for (int row = 0; row < 2; ++row) {
          ASSERT_EQ(retained(*as_ring(batched(*cache)->extract(row))),
                    retained(*as_ring(batched(*straight)->extract(row))))
              << "keep " << keep << ", trimmed " << trimmed << ", row " << row;
        }
      }
    }
  }
}

TEST(BatchRotatingKVCache, W5Z8NothingIsTrimmedOnceARowMayHaveLostATokenOrForANegativeNumber) {
  RingPair full = left_padded_pair(8, {3, 0}, 8);
  RingPair short_rows = merged(ring_singles(8, 0, {{20, 1}, {3}}));
  for (const RingPair* pair : {&full, &short_rows}) {
    const State before = pair->batch->state();
    EXPECT_FALSE(pair->batch->is_trimmable());
    EXPECT_EQ(pair->batch->max_trim(), 0);
    EXPECT_EQ(pair->batch->trim(1), 0);
    EXPECT_TRUE(identical(pair->batch->state(), before));
    EXPECT_EQ(code_of(error_of([&] { pair->batch->trim(-1); })), "invalid_argument");
  }
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

}  // namespace
}  // namespace reprise
