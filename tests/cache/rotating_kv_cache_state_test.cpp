// RotatingKVCache through states, files and batches: at every fill state it goes on exactly.
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/ring_model.h"
#include "tests/cache/ring_samples.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

void expect_same_future(RotatingKVCache& got, RotatingKVCache& want) {
  for (const int length : {1, 1, 3, 1, 9, 1}) {
    for (const int N : {1, 2, 9}) {
      const Mask a = got.make_mask(N, {.window = 5}), b = want.make_mask(N, {.window = 5});
      ASSERT_EQ(a.index(), b.index());
      if (std::holds_alternative<mx::array>(a)) {
        ASSERT_TRUE(identical(std::get<mx::array>(a), std::get<mx::array>(b)));
      }
    }
    const std::vector<int> tokens = range(*want.position(), *want.position() + length);
    ASSERT_EQ(tokens_of(append(got, tokens)), tokens_of(append(want, tokens)));
    ASSERT_EQ(got.position(), want.position());
    ASSERT_EQ(got.idx(), want.idx());
    ASSERT_EQ(got.size(), want.size());
    ASSERT_EQ(got.max_trim(), want.max_trim());
  }
}

TEST(RotatingKVCache, R8SavedAtAnyFillItGoesOnExactly) {
  for (const auto& fill : kRingFills) {
    for (const int trimmed : {0, 2}) {
      RotatingKVCache cache = filled_ring(8, 2, fill);
      cache.trim(trimmed);
      const std::vector<std::unique_ptr<LayerCache>> restored = [&] {
        std::vector<std::unique_ptr<LayerCache>> all;
        all.push_back(cache_from_state("RotatingKVCache", cache.state()));
        all.push_back(cache_from_state("RotatingKVCache", cache.saved_state()));
        all.push_back(cache_from_legacy("RotatingKVCache", cache.legacy_state(), cache.legacy_meta()));
        return all;
      }();
      for (const auto& each : restored) {
        auto& got = dynamic_cast<RotatingKVCache&>(*each);
        EXPECT_EQ(got.keep(), 2);
        EXPECT_EQ(got.max_size(), 8);
        EXPECT_EQ(got.empty(), cache.empty());
        const auto want = fork_of(cache);
        ASSERT_NO_FATAL_FAILURE(expect_same_future(got, *want));
      }
    }
  }
}

TEST(RotatingKVCache, R8FilesHoldEveryFillState) {
  const TemporaryFolder folder;
  for (const auto& fill : kRingFills) {
    PromptCache cache;
    cache.push_back(std::make_unique<RotatingKVCache>(filled_ring(8, 2, fill)));
    const std::string file = save_prompt_cache(folder.file("ring"), cache);
    PromptCache loaded = load_prompt_cache(file);
    std::filesystem::remove(file);
    ASSERT_EQ(loaded.size(), 1u);
    EXPECT_TRUE(identical(loaded[0].saved_state(), cache[0].saved_state()));
    ASSERT_NO_FATAL_FAILURE(expect_same_future(loaded.at<RotatingKVCache>(0), cache.at<RotatingKVCache>(0)));
  }
}

TEST(RotatingKVCache, P2SavedStateHoldsAllColumnsOfAFullRingAndNoUnusedOnes) {
  const auto saved_columns = [](const RotatingKVCache& cache) {
    return (*cache.saved_state().as_list())[0].as_array()->shape(2);
  };
  EXPECT_EQ(saved_columns(filled_ring(8, 2, {1, 1, 1})), 3);
  EXPECT_EQ(saved_columns(filled_ring(8, 2, {8, 1})), 8);
  EXPECT_EQ(saved_columns(filled_ring(8, 2, {20})), 20);
  EXPECT_EQ(saved_columns(filled_ring(600, 2, {1, 1, 1})), 3);
}

TEST(RotatingKVCache, P4BothGenerationsOfTheOlderLayoutAreRead) {
  RotatingKVCache cache = filled_ring(8, 2, {7, 1, 1, 1});
  const State state = cache.legacy_state();
  for (const Meta::List& meta : {Meta::List{"2", "8", "10", "4"}, Meta::List{"2", "8", "256", "10", "4"}}) {
    const auto restored = RotatingKVCache::from_legacy(state, Meta(meta));
    const auto want = fork_of(cache);
    ASSERT_NO_FATAL_FAILURE(expect_same_future(*restored, *want));
  }
  for (const Meta::List& meta :
       {Meta::List{}, Meta::List{"2", "8", "10"}, Meta::List{"2", "None", "10", "4"}, Meta::List{"2", "8", "10", "9"},
        Meta::List{"2", "8", "10", "1"}, Meta::List{"8", "8", "10", "4"}, Meta::List{"2", "20", "10", "8"},
        Meta::List{"2", "8", "-1", "4"}, Meta::List{"2", "8", "256", "10", "4", "0"}}) {
    EXPECT_EQ(error_of([&] { RotatingKVCache::from_legacy(state, Meta(meta)); }).substr(0, 12), "corrupt_data");
  }
}

TEST(RotatingKVCache, StatesThatCannotBeAreRefused) {
  const Rows five = rows(range(0, 5)), twelve = rows(range(0, 12));
  const State keys(five.keys), values(five.values), wide_keys(twelve.keys), wide_values(twelve.values);
  const auto state = [&](int offset, int keep, int max_size, int idx) {
    return State(State::List{keys, values, State(offset), State(keep), State(max_size), State(idx)});
  };
  const auto wide = [&](int offset, int idx) {
    return State(State::List{wide_keys, wide_values, State(offset), State(2), State(8), State(idx)});
  };
  for (const State& good : {state(5, 0, 8, 5), state(3, 4, 8, 3), state(9, 2, 5, 2), state(9, 2, 5, 5), wide(12, 12),
                            wide(15, 12), state(5, 0, 5, 5)}) {
    EXPECT_EQ(error_of([&] { RotatingKVCache::from_state(good); }), "nothing");
  }
  for (const State& bad : {state(6, 0, 8, 6), state(5, 0, 8, 4), state(3, 0, 8, 5), state(5, 8, 8, 5),
                           state(5, 0, 0, 5), state(-1, 0, 8, -1), state(9, 2, 5, 1), state(9, 2, 5, 6), wide(12, 8),
                           wide(7, 7), wide(15, 3), State(State::List{keys, values, State(5)}), State(State::List{}),
                           State(5), State(State::List{State(), State(), State(5), State(0), State(8), State(5)}),
                           State(State::List{State(), State(), State(9), State(0), State(8), State(0)}),
                           State(State::List{State(), State(), State(0), State(0), State(8), State(3)}),
                           State(State::List{keys, State(), State(5), State(0), State(8), State(5)}),
                           State(State::List{keys, values, State(5), State(0), State(8.0), State(5)})}) {
    EXPECT_EQ(error_of([&] { RotatingKVCache::from_state(bad); }).substr(0, 12), "corrupt_data");
  }
  EXPECT_EQ(error_of([&] { RotatingKVCache::from_state(state(9, 2, 5, 1)); }),
            "corrupt_data: [RotatingKVCache::from_state] idx must lie in [2, 5], but got 1");
}

TEST(RotatingKVCache, RowsThatWereLostElsewhereAreNotMadeUp) {
  // A buffer of fewer columns than were given, as a batch that lost some may leave it.
  const Rows three = rows(range(7, 10));
  const auto cache = RotatingKVCache::from_state(
      State(State::List{State(three.keys), State(three.values), State(10), State(0), State(8), State(3)}));
  EXPECT_EQ(tokens_of(append(*cache, {10})), range(7, 11));
  EXPECT_EQ(std::get<mx::array>(cache->make_mask(2, {.return_array = true})).shape(), (mx::Shape{2, 6}));
  EXPECT_EQ(tokens_of(append(*cache, {11, 12})), range(7, 13));
  for (int i = 13; i < 20; ++i) append(*cache, {i});
  EXPECT_EQ(sorted(tokens_of(cache->keys_and_values())), range(12, 20));
}

TEST(RotatingKVCache, R7ExtractAfterMergeGoesOnLikeTheSingleOne) {
  for (const int keep : {0, 2}) {
    std::vector<std::unique_ptr<LayerCache>> singles;
    std::vector<const LayerCache*> pointers;
    for (const auto& fill : kRingFills) {
      singles.push_back(std::make_unique<RotatingKVCache>(filled_ring(8, keep, fill)));
      pointers.push_back(singles.back().get());
    }
    const auto batch = merge_caches(pointers);
    EXPECT_EQ(batch->class_name(), "BatchRotatingKVCache");
    for (std::size_t row = 0; row < singles.size(); ++row) {
      const auto extracted = batched(*batch)->extract(static_cast<int>(row));
      auto& got = dynamic_cast<RotatingKVCache&>(*extracted);
      RingModel model{8, keep, range(0, *singles[row]->position())};
      ASSERT_EQ(got.position(), model.offset());
      ASSERT_EQ(got.keep(), keep);
      ASSERT_EQ(got.max_size(), 8);
      for (const int length : {1, 1, 3, 1, 9, 1, 1}) {
        const std::vector<int> tokens = range(model.offset(), model.offset() + length);
        ASSERT_EQ(sorted(tokens_of(append(got, tokens))), sorted(model.append(tokens))) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace reprise
