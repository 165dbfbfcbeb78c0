#include "reprise/cache/batch_chunked_kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kChunk = 5;
constexpr int kFiller = 99;

// Rows of these tokens, one list a batch row.
void append_each(AttentionCache& cache, const std::vector<std::vector<int>>& tokens) {
  std::vector<mx::array> keys, values;
  for (const auto& row : tokens) {
    const Rows one = rows(row);
    keys.push_back(one.keys);
    values.push_back(one.values);
  }
  cache.update_and_fetch(mx::concatenate(keys, 0), mx::concatenate(values, 0));
}

std::unique_ptr<ChunkedKVCache> single(int length, bool slid) {
  auto cache = std::make_unique<ChunkedKVCache>(kChunk);
  if (length > 0) append(*cache, range(0, length));
  if (slid) cache->maybe_trim_front();
  return cache;
}

std::unique_ptr<BatchChunkedKVCache> merged(const std::vector<const LayerCache*>& caches) {
  auto batch = merge_caches(caches);
  EXPECT_EQ(batch->class_name(), "BatchChunkedKVCache");
  return std::unique_ptr<BatchChunkedKVCache>(&dynamic_cast<BatchChunkedKVCache&>(*batch.release()));
}

// A batch beside what each of its rows must hold.
class Checked {
 public:
  explicit Checked(const std::vector<int>& lengths, bool slid = false) {
    std::vector<std::unique_ptr<ChunkedKVCache>> owned;
    std::vector<const LayerCache*> caches;
    for (const int length : lengths) {
      caches.push_back(owned.emplace_back(single(length, slid)).get());
      counts.push_back(length);
    }
    batch = merged(caches);
  }

  int num_rows() const { return static_cast<int>(counts.size()); }

  void forward(int columns) {
    batch->maybe_trim_front();
    std::vector<std::vector<int>> tokens;
    for (int& count : counts) {
      tokens.push_back(range(count, count + columns));
      count += columns;
    }
    append_each(*batch, tokens);
    expect_right();
  }

  // A right-padded prompt in pieces.
  void prompt(const std::vector<int>& lengths, int piece) {
    const int width = *std::max_element(lengths.begin(), lengths.end());
    std::vector<std::vector<int>> tokens;
    BatchPrompt announced{.lengths = lengths};
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      tokens.push_back(range(counts[row], counts[row] + lengths[row]));
      tokens.back().resize(static_cast<std::size_t>(width), kFiller);
      announced.right_padding.push_back(width - lengths[row]);
      counts[row] += lengths[row];
    }
    batch->prepare(announced);
    for (int at = 0; at < width; at += piece) {
      batch->maybe_trim_front();
      std::vector<std::vector<int>> part;
      for (const auto& row : tokens) part.emplace_back(row.begin() + at, row.begin() + std::min(width, at + piece));
      append_each(*batch, part);
    }
    batch->finalize();
    expect_right();
  }

  // Each row has its whole chunk, at the right positions, and continues as a cache of its own.
  void expect_right() const {
    ASSERT_EQ(batch->batch_size(), num_rows());
    EXPECT_EQ(batch->positions(), counts);
    for (int row = 0; row < num_rows(); ++row) {
      const int count = counts[static_cast<std::size_t>(row)];
      const auto alone = batch->extract(row);
      const auto& chunked = dynamic_cast<const ChunkedKVCache&>(*alone);
      EXPECT_EQ(chunked.chunk_size(), kChunk);
      EXPECT_EQ(chunked.position(), count);
      EXPECT_EQ(chunked.start_position(), batch->starts()[static_cast<std::size_t>(row)]);
      EXPECT_LE(chunked.start_position(), count / kChunk * kChunk);
      if (!chunked.empty()) {
        EXPECT_EQ(tokens_of(chunked.keys_and_values()), range(chunked.start_position(), count)) << "row " << row;
      }
    }
  }

  std::unique_ptr<BatchChunkedKVCache> batch;
  std::vector<int> counts;
};

TEST(BatchChunkedKVCache, RandomOperationsLeaveEachRowAsItWouldBeAlone) {
  std::mt19937 random(11);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int run = 0; run < 30; ++run) {
    Checked checked({draw(0, 14), draw(0, 14), draw(0, 14)}, draw(0, 1) == 1);
    checked.expect_right();
    for (int step = 0; step < 15; ++step) {
      SCOPED_TRACE("run " + std::to_string(run) + " step " + std::to_string(step));
      if (*std::max_element(checked.counts.begin(), checked.counts.end()) > 80) break;  // filler is 99
      const int action = draw(0, 9);
      if (action <= 3) {
        checked.forward(draw(1, 3));
      } else if (action <= 5) {
        std::vector<int> lengths;
        for (int row = 0; row < checked.num_rows(); ++row) lengths.push_back(draw(1, 12));
        checked.prompt(lengths, draw(1, 13));
      } else if (action == 6) {
        const int shortest = *std::min_element(checked.counts.begin(), checked.counts.end());
        const int most = std::min(checked.batch->max_trim(), shortest);
        const int trimmed = checked.batch->trim(draw(0, most));
        for (int& count : checked.counts) count -= trimmed;
        checked.expect_right();
      } else if (action == 7) {
        const int row = draw(0, checked.num_rows() - 1);
        const int other = draw(0, checked.num_rows() - 1);
        checked.batch->filter({row, other});
        checked.counts = {checked.counts[static_cast<std::size_t>(row)],
                          checked.counts[static_cast<std::size_t>(other)]};
        checked.expect_right();
      } else if (action == 8) {
        const Checked more({draw(0, 14), draw(1, 14)}, draw(0, 1) == 1);
        checked.batch->extend(*more.batch);
        checked.counts.insert(checked.counts.end(), more.counts.begin(), more.counts.end());
        checked.expect_right();
      } else {
        const State state = draw(0, 1) == 1 ? checked.batch->saved_state() : checked.batch->state();
        checked.batch = BatchChunkedKVCache::from_state(state);
        checked.expect_right();
      }
    }
  }
}

TEST(BatchChunkedKVCache, TheFrontStaysWhileAPromptIsPadded) {
  Checked checked({4, 12});
  checked.batch->prepare({.lengths = {1, 9}, .right_padding = {8, 0}});
  checked.batch->maybe_trim_front();
  EXPECT_EQ(checked.batch->idx(), 12);
  checked.batch->finalize();
  checked.batch->maybe_trim_front();
  EXPECT_EQ(checked.batch->idx(), kChunk);
}

TEST(BatchChunkedKVCache, Z8MaxTrimIsThatOfTheRowThatHasLeast) {
  for (const bool slid : {false, true}) {
    std::vector<std::unique_ptr<ChunkedKVCache>> alone;
    std::vector<const LayerCache*> caches;
    int least = 100;
    for (const int length : {9, 12, 13}) {
      caches.push_back(alone.emplace_back(single(length, slid)).get());
      if (slid) least = std::min(least, alone.back()->max_trim());
    }
    // Rows that dropped nothing can be trimmed to nothing, each.
    const auto batch = merged(caches);
    EXPECT_EQ(batch->max_trim(), slid ? least : batch->idx());
    EXPECT_FALSE(batch->keeps_all_rows());
  }
}

TEST(BatchChunkedKVCache, Z3WhatDoesNotFitIsRefusedAndChangesNothing) {
  EXPECT_EQ(error_of([] { BatchChunkedKVCache(0, {0}); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { BatchChunkedKVCache(4, {-1}); }).substr(0, 16), "invalid_argument");
  ChunkedKVCache four(4), five(5);
  EXPECT_EQ(error_of([&] { merge_caches({&four, &five}); }).substr(0, 16), "invalid_argument");
  Checked checked({3, 7});
  const State before = checked.batch->state();
  BatchChunkedKVCache other(4, {0});
  EXPECT_EQ(error_of([&] { checked.batch->extend(other); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { checked.batch->extend(four); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { checked.batch->filter({2}); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { checked.batch->extract(2); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(identical(checked.batch->state(), before));
  checked.expect_right();
}

TEST(BatchChunkedKVCache, StatesThatCannotBeAreRefused) {
  Checked checked({3, 12}, true);
  const State good = checked.batch->state();
  const auto with = [&](std::size_t item, State value) {
    State::List items = *good.as_list();
    items[item] = std::move(value);
    return State(std::move(items));
  };
  EXPECT_EQ(error_of([&] { BatchChunkedKVCache::from_state(good); }), "nothing");
  for (const State& bad :
       {with(5, State(0)), with(4, State(-1)), with(4, State(1 << 20)), with(2, State(3)),
        with(2, State(mx::array({0, 7}, {2}, mx::int32))), with(2, State(mx::array({3, 2147483647}, {2}, mx::int32))),
        with(3, State(mx::array({-1, 0}, {2}, mx::int32)))}) {
    EXPECT_EQ(error_of([&] { BatchChunkedKVCache::from_state(bad); }).substr(0, 12), "corrupt_data");
  }
}

}  // namespace
}  // namespace reprise
