// A rewound prompt cache must go on as one that was never fed further: compared by what a tiny model answers over
// growing, ring, chunked and recurrent layers, and by the rows that they hold.
#include "reprise/cache/snapshots.h"

#include <gtest/gtest.h>

#include <random>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kSize = 32;

mx::array embedding(int token, int part, int heads) {
  return mx::random::normal({1, heads, 1, kSize}, mx::float32, 0.0f, 1.0f,
                            mx::random::key(static_cast<std::uint64_t>(8 * token + part)));
}

// What a layer answers to a token: attention over its rows, or the state of a leaky sum.
mx::array answer(LayerCache& layer, int token) {
  if (auto* list = dynamic_cast<CacheList*>(&layer)) {
    mx::array sum = mx::zeros({1, 1, 1, kSize});
    for (std::size_t i = 0; i < list->num_children(); ++i) sum = mx::add(sum, answer(list->child(i), token));
    return sum;
  }
  if (auto* arrays = dynamic_cast<ArraysCache*>(&layer)) {
    const mx::array before = arrays->get(0).value_or(mx::zeros({1, 1, 1, kSize}));
    arrays->set(0, mx::add(mx::multiply(before, mx::array(0.75f)), embedding(token, 0, 1)));
    return *arrays->get(0);
  }
  if (auto* chunked = dynamic_cast<ChunkedKVCache*>(&layer)) chunked->maybe_trim_front();
  auto& cache = dynamic_cast<AttentionCache&>(layer);
  AttentionOptions options;
  options.mask = cache.make_mask(1);
  return mx::sum(cache.attend(embedding(token, 1, 4), embedding(token, 2, 2), embedding(token, 3, 2), options), 1,
                 true);
}

// The answers of all layers to the last token.
mx::array feed(PromptCache& cache, const std::vector<int>& tokens) {
  std::vector<mx::array> answers;
  for (const int token : tokens) {
    answers.clear();
    for (std::size_t layer = 0; layer < cache.size(); ++layer) answers.push_back(answer(cache[layer], token));
  }
  mx::array all = mx::concatenate(answers, 0);
  mx::eval(all);
  return all;
}

bool close(const mx::array& a, const mx::array& b) { return mx::allclose(a, b, 1e-5, 1e-5).item<bool>(); }

PromptCache list_of(std::vector<std::unique_ptr<LayerCache>> layers) { return PromptCache(std::move(layers)); }

template <typename... Caches>
PromptCache prompt_cache(std::unique_ptr<Caches>... caches) {
  std::vector<std::unique_ptr<LayerCache>> layers;
  (layers.push_back(std::move(caches)), ...);
  return list_of(std::move(layers));
}

PromptCache mixed() {
  return prompt_cache(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(8, 2),
                      std::make_unique<ArraysCache>(1), std::make_unique<ChunkedKVCache>(4),
                      std::make_unique<CacheList>(std::make_unique<KVCache>(), std::make_unique<MambaCache>(),
                                                  std::make_unique<RotatingKVCache>(5)));
}

std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<State> states(const PromptCache& cache) {
  std::vector<State> out;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) out.push_back(cache[layer].state());
  return out;
}

bool same(const std::vector<State>& a, const std::vector<State>& b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) equal = identical(a[i], b[i]);
  return equal;
}

bool same_rows(const PromptCache& a, const PromptCache& b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) equal = identical(a[i].saved_state(), b[i].saved_state());
  return equal;
}

// `live` has been fed `record`: both must answer the next tokens as a cold cache does.
void expect_as_cold(PromptCache& live, const std::vector<int>& record) {
  PromptCache cold = mixed();
  feed(cold, record);
  EXPECT_TRUE(same_rows(live, cold));
  PromptCache warm = live.fork();
  EXPECT_TRUE(close(feed(warm, range(200, 203)), feed(cold, range(200, 203))));
}

TEST(Snapshots, X3RewoundAndFedAgainEqualsColdInEveryLayer) {
  PromptCache live = mixed();
  Snapshots snapshots;
  for (const int begin : {0, 10, 20}) {
    feed(live, range(begin, begin + 10));
    EXPECT_TRUE(snapshots.take(live));
  }
  feed(live, range(30, 41));
  ASSERT_EQ(snapshots.rewind(live, 25), 20);
  check_prompt_cache(live, 20);
  expect_as_cold(live, range(0, 20));
  EXPECT_EQ(snapshots.positions(), (std::vector<int>{10, 20}));

  feed(live, joined(range(20, 25), range(100, 120)));
  expect_as_cold(live, joined(range(0, 25), range(100, 120)));

  // A snapshot stays what it was when it has been used.
  ASSERT_EQ(snapshots.rewind(live, 20), 20);
  expect_as_cold(live, range(0, 20));
  feed(live, range(120, 140));
  ASSERT_EQ(snapshots.rewind(live, 19), 10);
  expect_as_cold(live, range(0, 10));
  EXPECT_EQ(snapshots.positions(), std::vector<int>{10});
}

TEST(Snapshots, X3AnyMixOfFeedsSnapshotsAndRewindsEqualsCold) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  PromptCache live = mixed();
  Snapshots snapshots({.max_count = 4});
  std::vector<int> record;
  int rewound = 0;
  for (int step = 0; step < 40; ++step) {
    const int what = below(4);
    if (what == 0 && !record.empty()) {
      const auto to = below(static_cast<int>(record.size()) + 1);
      if (const auto reached = snapshots.rewind(live, to)) {
        ASSERT_LE(*reached, to);
        record.resize(static_cast<std::size_t>(*reached));
        ++rewound;
      }
      expect_as_cold(live, record);
    } else if (what == 1) {
      snapshots.take(live);
    } else {
      const int first = below(150);
      const auto tokens = range(first, first + 1 + below(6));
      feed(live, tokens);
      record = joined(record, tokens);
    }
    check_prompt_cache(live, static_cast<int>(record.size()));
  }
  EXPECT_GT(rewound, 3);
}

TEST(Snapshots, X3WhatCanTrimIsTrimmedToTheVeryPosition) {
  PromptCache live = prompt_cache(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(64));
  Snapshots snapshots;
  feed(live, range(0, 10));
  snapshots.take(live);
  feed(live, range(10, 20));
  snapshots.take(live);
  EXPECT_EQ(snapshots.rewind(live, 13), 13);
  EXPECT_EQ(snapshots.positions(), std::vector<int>{10});
  PromptCache cold = prompt_cache(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(64));
  feed(cold, range(0, 13));
  EXPECT_TRUE(close(feed(live, {50}), feed(cold, {50})));
  EXPECT_EQ(snapshots.rewind(live, 14), 14);
  EXPECT_EQ(snapshots.rewind(live, 99), 14) << "nothing to take back";
}

TEST(Snapshots, X3WithoutAWayBackNothingChanges) {
  PromptCache live = mixed();
  Snapshots snapshots;
  feed(live, range(0, 20));
  const auto before = states(live);
  EXPECT_EQ(snapshots.rewind(live, 12), std::nullopt);
  EXPECT_TRUE(same(states(live), before));
  snapshots.take(live);
  feed(live, range(20, 30));
  const auto later = states(live);
  EXPECT_EQ(snapshots.rewind(live, 19), std::nullopt);
  EXPECT_TRUE(same(states(live), later));
  EXPECT_EQ(snapshots.positions(), std::vector<int>{20}) << "it still leads back";
  EXPECT_THROW(snapshots.rewind(live, -1), Error);
  EXPECT_TRUE(same(states(live), later));
}

TEST(Snapshots, X3RecurrentStateIsRestoredAndNeverZeroed) {
  PromptCache live = prompt_cache(std::make_unique<ArraysCache>(1));
  Snapshots snapshots;
  EXPECT_THROW(snapshots.take(live), Error) << "no layer knows where it stands";
  const mx::array at_five = feed(live, range(0, 5));
  EXPECT_TRUE(snapshots.take(live, 5));
  const mx::array at_nine = feed(live, range(5, 9));
  EXPECT_EQ(snapshots.rewind(live, 4), std::nullopt);
  EXPECT_TRUE(identical(*live.at<ArraysCache>(0).get(0), at_nine));
  EXPECT_EQ(snapshots.rewind(live, 7), 5);
  EXPECT_TRUE(identical(*live.at<ArraysCache>(0).get(0), at_five));
  // Back to the start: unset, as before the first token.
  PromptCache fresh = prompt_cache(std::make_unique<ArraysCache>(1));
  Snapshots from_start;
  from_start.take(fresh, 0);
  feed(fresh, range(0, 5));
  EXPECT_EQ(from_start.rewind(fresh, 3), 0);
  EXPECT_TRUE(fresh[0].empty());
}

TEST(Snapshots, X3LiveDecodingAndSnapshotsDoNotDisturbEachOther) {
  PromptCache live = mixed(), alone = mixed();
  Snapshots snapshots;
  feed(live, range(0, 9));
  feed(alone, range(0, 9));
  const auto at_nine = states(live);
  snapshots.take(live);
  for (int token = 9; token < 30; ++token) ASSERT_TRUE(identical(feed(live, {token}), feed(alone, {token})));
  ASSERT_EQ(snapshots.rewind(live, 9), 9);
  const auto restored = states(live);
  for (const std::size_t layer : {1u, 2u, 3u}) EXPECT_TRUE(identical(restored[layer], at_nine[layer])) << layer;
  // The restored cache is written to; the snapshot is not.
  for (int token = 60; token < 80; ++token) feed(live, {token});
  ASSERT_EQ(snapshots.rewind(live, 9), 9);
  for (const std::size_t layer : {1u, 2u, 3u}) EXPECT_TRUE(identical(states(live)[layer], at_nine[layer])) << layer;
}

TEST(Snapshots, X3LayersThatKeepTheirRowsCostNothing) {
  PromptCache growing = make_kv_prompt_cache(2);
  Snapshots snapshots;
  feed(growing, range(0, 5));
  EXPECT_FALSE(snapshots.take(growing));
  EXPECT_EQ(snapshots.nbytes(), 0u);
  EXPECT_EQ(snapshots.rewind(growing, 3), 3);

  PromptCache live = mixed();
  feed(live, range(0, 12));
  EXPECT_TRUE(snapshots.take(live));
  const auto& list = dynamic_cast<const CacheList&>(live[4]);
  EXPECT_EQ(snapshots.nbytes(),
            live[1].nbytes() + live[2].nbytes() + live[3].nbytes() + list.child(1).nbytes() + list.child(2).nbytes());
  // Between growths the live buffer is written in place although a snapshot stands.
  auto& kv = live.at<KVCache>(0);
  const auto address = [&] {
    mx::array keys = kv.buffer()->tensors().front();
    mx::eval(keys);
    return keys.data<float>();
  };
  const auto before = address();
  feed(live, {12, 13, 14});
  EXPECT_EQ(address(), before);
}

TEST(Snapshots, X3LimitsHoldAfterEverySnapshotAndTheRestIsSpread) {
  PromptCache live = prompt_cache(std::make_unique<KVCache>(), std::make_unique<ArraysCache>(1));
  Snapshots by_count({.max_count = 5}), by_bytes({.max_count = 100, .max_bytes = 4 * kSize * sizeof(float)});
  for (int token = 0; token < 64; ++token) {
    feed(live, {token});
    for (Snapshots* snapshots : {&by_count, &by_bytes}) {
      EXPECT_TRUE(snapshots->take(live));
      EXPECT_EQ(snapshots->positions().front(), 1);
      EXPECT_EQ(snapshots->positions().back(), token + 1);
    }
    ASSERT_LE(by_count.positions().size(), 5u);
    ASSERT_LE(by_bytes.nbytes(), 4 * kSize * sizeof(float));
  }
  EXPECT_EQ(by_bytes.positions().size(), 4u);
  const auto positions = by_count.positions();
  ASSERT_EQ(positions.size(), 5u);
  for (std::size_t i = 1; i < positions.size(); ++i) EXPECT_LE(positions[i] - positions[i - 1], 40);

  Snapshots only_one({.max_count = 1}), none({.max_count = 0}), tiny({.max_bytes = 1});
  for (int token = 0; token < 3; ++token) {
    feed(live, {token});
    EXPECT_TRUE(only_one.take(live));
    EXPECT_EQ(only_one.positions(), std::vector<int>{65 + token});
    EXPECT_FALSE(none.take(live));
    EXPECT_FALSE(tiny.take(live));
  }
  EXPECT_EQ(none.rewind(live, 3), std::nullopt);
}

TEST(Snapshots, X3OneThatExceedsTheLimitsAloneEvictsNothing) {
  PromptCache live = prompt_cache(std::make_unique<RotatingKVCache>(300));
  Snapshots snapshots;
  feed(live, {0});
  const std::size_t one = live[0].nbytes();
  Snapshots limited({.max_bytes = one});
  EXPECT_TRUE(limited.take(live));
  for (int token = 1; token < 258; ++token) feed(live, {token});
  ASSERT_GT(live[0].nbytes(), one);
  EXPECT_FALSE(limited.take(live));
  EXPECT_EQ(limited.positions(), std::vector<int>{1});
}

TEST(Snapshots, X3TheSamePositionIsHeldOnceAndLaterOnesAreForgotten) {
  PromptCache live = mixed();
  Snapshots snapshots;
  feed(live, range(0, 6));
  snapshots.take(live);
  snapshots.take(live);
  EXPECT_EQ(snapshots.positions(), std::vector<int>{6});
  feed(live, range(6, 12));
  snapshots.take(live);
  snapshots.forget_after(12);
  EXPECT_EQ(snapshots.positions(), (std::vector<int>{6, 12}));
  snapshots.forget_after(11);
  EXPECT_EQ(snapshots.positions(), std::vector<int>{6});
  snapshots.clear();
  EXPECT_EQ(snapshots.rewind(live, 6), std::nullopt);
}

TEST(Snapshots, X3LayersThatWereReplacedMeanwhileAreToldApart) {
  PromptCache live = mixed();
  Snapshots snapshots;
  feed(live, range(0, 12));
  snapshots.take(live);
  feed(live, range(12, 20));

  // Rows quantised meanwhile are still all there.
  live.replace(0, live[0].to_quantized(32, 8));
  ASSERT_EQ(snapshots.rewind(live, 12), 12);
  EXPECT_EQ(live[0].class_name(), "QuantizedKVCache");
  check_prompt_cache(live, 12);

  feed(live, range(12, 20));
  auto other = std::make_unique<ChunkedKVCache>(64);
  for (int token = 0; token < 20; ++token) answer(*other, token);
  live.replace(1, std::move(other));
  const auto before = states(live);
  EXPECT_EQ(snapshots.rewind(live, 12), std::nullopt) << "the ring's rows of then are of another class";
  EXPECT_TRUE(same(states(live), before));

  PromptCache shorter = prompt_cache(std::make_unique<KVCache>(), std::make_unique<ArraysCache>(1));
  feed(shorter, range(0, 20));
  EXPECT_EQ(snapshots.rewind(shorter, 12), std::nullopt);

  // A growing layer that has lost rows which the snapshot counts on.
  PromptCache lost = mixed();
  feed(lost, range(0, 12));
  snapshots.clear();
  snapshots.take(lost);
  PromptCache fewer = mixed();
  feed(fewer, range(0, 11));
  EXPECT_EQ(snapshots.rewind(fewer, 11), 11);
  EXPECT_EQ(snapshots.rewind(fewer, 10), std::nullopt);
}

TEST(Snapshots, X3WhatIsNoSequenceInStepIsRefused) {
  PromptCache apart = prompt_cache(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(8));
  answer(apart[0], 1);
  Snapshots snapshots;
  EXPECT_THROW(snapshots.take(apart), Error);
  EXPECT_THROW(snapshots.rewind(apart, 0), Error);
  PromptCache batch = prompt_cache(std::make_unique<BatchKVCache>(std::vector<int>{0, 1}));
  EXPECT_THROW(snapshots.take(batch), Error);
  PromptCache live = mixed();
  feed(live, {1});
  EXPECT_THROW(snapshots.take(live, 2), Error);
  EXPECT_THROW(snapshots.take(live, -1), Error);
  EXPECT_TRUE(snapshots.positions().empty());
}

TEST(Snapshots, X9WhatIsHeldIsEvaluatedAndNoMoreThanItSays) {
  PromptCache live = prompt_cache(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(16),
                                  std::make_unique<ArraysCache>(1));
  Snapshots snapshots({.max_count = 3});
  std::size_t after_first = 0;
  for (int token = 0; token < 200; ++token) {
    for (std::size_t layer = 0; layer < live.size(); ++layer) answer(live[layer], token % 100);
    snapshots.take(live);  // nothing else evaluates
    live.eval();
    if (token == 50) after_first = active_bytes();
  }
  EXPECT_LE(active_bytes(), after_first + 4096);
}

}  // namespace
}  // namespace reprise
