// Rotating batches as states, pairs and files.
#include "reprise/cache/batch_rotating_kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

TEST(BatchRotatingKVCache, P5ReloadedInTheMiddleOfAPaddedPromptItGoesOn) {
  for (const int keep : {0, 3}) {
    for (const bool saved : {false, true}) {
      RingPair pair = merged(ring_singles(8, keep, {{14, 1}, {2}}));
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
  RingPair pair = merged(ring_singles(8, 3, {{14, 1}, {2}}));
  ASSERT_NO_FATAL_FAILURE(decode(pair, 4));
  const auto plain = as_ring_batch(cache_from_state("BatchRotatingKVCache", pair.batch->saved_state()));
  const Mask mask = plain->make_mask(2);
  const KeysValues all = append_batch(*plain, {of_row(0, 19, 21), of_row(1, 6, 8)}, kRingShape);
  EXPECT_EQ(seen(all, mask, 2, 0)[0], of_row(0, 14, 20));
  EXPECT_EQ(seen(all, mask, 2, 1)[0], of_row(1, 3, 7));
}

TEST(BatchRotatingKVCache, P5AFileKeepsSinksAndAnUnfinishedPrompt) {
  const TemporaryFolder folder;
  for (const int keep : {0, 3}) {
    RingPair pair = merged(ring_singles(8, keep, {{14, 1}, {2}}));
    ASSERT_NO_FATAL_FAILURE(decode(pair, 3));
    pair.batch->prepare({.lengths = {5, 1}, .right_padding = {0, 4}});
    ASSERT_NO_FATAL_FAILURE(go_on(pair, {3, 1}, 3));
    PromptCache cache;
    cache.push_back(pair.batch->fork());
    const std::string file = save_prompt_cache(folder.file("batch"), cache);
    pair.batch = as_ring_batch(load_prompt_cache_file(file).cache[0].fork());
    EXPECT_EQ(pair.batch->keep(), keep);
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
    ASSERT_NO_FATAL_FAILURE(go_on(pair, {2, 0}, 2));
    pair.batch->finalize();
    ASSERT_NO_FATAL_FAILURE(decode(pair, 12));
    ASSERT_NO_FATAL_FAILURE(expect_extracts(pair));
  }
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
