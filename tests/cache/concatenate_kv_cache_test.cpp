#include "reprise/cache/concatenate_kv_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

void expect_holds(const ConcatenateKVCache& cache, const std::vector<int>& tokens) {
  const auto count = static_cast<int>(tokens.size());
  EXPECT_EQ(cache.length(), count);
  EXPECT_EQ(cache.position(), count);
  EXPECT_EQ(std::get<int>(cache.offset()), count);
  EXPECT_EQ(cache.max_trim(), count);
  EXPECT_EQ(tokens_of(cache.keys_and_values()), tokens);
}

std::size_t bytes_of(int rows) { return static_cast<std::size_t>(rows) * 2 * 2 * 4 * sizeof(float); }

TEST(ConcatenateKVCache, C1TheBufferIsAsWideAsItsRows) {
  ConcatenateKVCache cache;
  EXPECT_EQ(cache.nbytes(), 0u);
  append(cache, range(0, 5));
  EXPECT_EQ(cache.nbytes(), bytes_of(5));
  append(cache, range(5, 6));
  EXPECT_EQ(cache.nbytes(), bytes_of(6));
  expect_holds(cache, range(0, 6));
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.class_name(), "ConcatenateKVCache");
}

TEST(ConcatenateKVCache, C1TrimmedRowsAreGoneForEveryReader) {
  ConcatenateKVCache cache;
  append(cache, range(0, 8));
  EXPECT_EQ(cache.trim(3), 3);
  expect_holds(cache, range(0, 5));
  for (const State& state : {cache.state(), cache.saved_state(), cache.legacy_state()}) {
    const auto restored = ConcatenateKVCache::from_state(state);
    expect_holds(*restored, range(0, 5));
    append(*restored, {50});
    expect_holds(*restored, {0, 1, 2, 3, 4, 50});
  }
  EXPECT_EQ(std::get<mx::array>(cache.make_mask(2, {.return_array = true})).shape(), (mx::Shape{2, 7}));
  EXPECT_EQ(tokens_of(append(cache, {50, 51})), (std::vector<int>{0, 1, 2, 3, 4, 50, 51}));
  expect_holds(cache, {0, 1, 2, 3, 4, 50, 51});
  EXPECT_EQ(cache.nbytes(), bytes_of(7));
}

TEST(ConcatenateKVCache, C1EqualsKVCacheOnTheSameScript) {
  std::mt19937 random(7);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int script = 0; script < 30; ++script) {
    ConcatenateKVCache cache;
    KVCache reference;
    for (int step = 0; step < 12; ++step) {
      if (step > 0 && pick(0, 2) == 0) {
        const int n = pick(0, 12);
        EXPECT_EQ(cache.trim(n), reference.trim(n));
      } else {
        const std::vector<int> added = range(100 * step, 100 * step + pick(1, 9));
        EXPECT_EQ(tokens_of(append(cache, added)), tokens_of(append(reference, added)));
      }
      EXPECT_EQ(std::get<int>(cache.offset()), std::get<int>(reference.offset()));
      EXPECT_EQ(cache.length(), reference.length());
      EXPECT_EQ(tokens_of(cache.keys_and_values()), tokens_of(reference.keys_and_values()));
      EXPECT_EQ(cache.make_mask(3).index(), reference.make_mask(3).index());
      EXPECT_TRUE(identical(cache.saved_state().as_list()->at(0), reference.saved_state().as_list()->at(0)));
      EXPECT_TRUE(identical(cache.saved_state().as_list()->at(1), reference.saved_state().as_list()->at(1)));
    }
  }
}

TEST(ConcatenateKVCache, C1AnEmptyOneRestores) {
  const ConcatenateKVCache empty;
  for (const State& state : {empty.state(), empty.saved_state()}) {
    const auto restored = cache_from_state("ConcatenateKVCache", state);
    EXPECT_TRUE(restored->empty());
    append(dynamic_cast<AttentionCache&>(*restored), {1, 2});
    EXPECT_EQ(restored->length(), 2);
  }
  EXPECT_EQ(error_of([&] { empty.keys_and_values(); }).substr(0, 19), "failed_precondition");
}

TEST(ConcatenateKVCache, Z8TrimForgetsWhatThereIs) {
  for (const auto& [n, trimmed] : std::vector<std::pair<int, int>>{{0, 0}, {1, 1}, {5, 5}, {6, 6}, {15, 6}}) {
    ConcatenateKVCache cache;
    append(cache, range(0, 6));
    EXPECT_TRUE(cache.is_trimmable());
    EXPECT_EQ(cache.trim(n), trimmed);
    expect_holds(cache, range(0, 6 - trimmed));
    EXPECT_FALSE(cache.empty());
    append(cache, {70});
    std::vector<int> left = range(0, 6 - trimmed);
    left.push_back(70);
    expect_holds(cache, left);
  }
  ConcatenateKVCache cache;
  EXPECT_EQ(cache.trim(3), 0);
  append(cache, range(0, 6));
  EXPECT_EQ(error_of([&] { cache.trim(-1); }),
            "invalid_argument: [ConcatenateKVCache::trim] n must not be negative, but got -1");
  expect_holds(cache, range(0, 6));
}

TEST(ConcatenateKVCache, Z3CallsThatThrowChangeNothing) {
  ConcatenateKVCache cache;
  append(cache, range(0, 5));
  const State before = cache.state();
  for (const RowShape& shape :
       {RowShape{.batch = 2}, {.heads = 1}, {.key_size = 3}, {.value_size = 5}, {.dtype = mx::float16}}) {
    EXPECT_EQ(error_of([&] { append(cache, {5}, shape); }).substr(0, 16), "invalid_argument");
  }
  EXPECT_EQ(error_of([&] { cache.make_mask(0); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { cache.to_quantized(); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { cache.merge({&cache}); }).substr(0, 11), "unsupported");
  EXPECT_TRUE(identical(cache.state(), before));
  append(cache, {5});
  expect_holds(cache, range(0, 6));
}

TEST(ConcatenateKVCache, Z5NoRowsChangeNothing) {
  ConcatenateKVCache cache;
  EXPECT_EQ(error_of([&] { append(cache, {}); }).substr(0, 16), "invalid_argument");
  append(cache, range(0, 4));
  cache.trim(1);
  EXPECT_EQ(tokens_of(append(cache, {})), range(0, 3));
  expect_holds(cache, range(0, 3));
}

TEST(ConcatenateKVCache, Z2ArraysHandedOutAreValues) {
  ConcatenateKVCache cache;
  const Rows given = rows(range(0, 5));
  const KeysValues seen = cache.update_and_fetch(given.keys, given.values);
  const State state = cache.state();
  cache.trim(2);
  for (int i = 0; i < 5; ++i) append(cache, {500 + i});
  EXPECT_EQ(tokens_of(seen), range(0, 5));
  EXPECT_EQ(tokens_of(given.keys), range(0, 5));
  EXPECT_EQ(tokens_of(*state.as_list()->at(0).as_array()), range(0, 5));
}

// A view of a larger block would keep all of it alive.
TEST(ConcatenateKVCache, Z7TheFirstRowsHoldNoLargerBuffer) {
  ConcatenateKVCache cache;
  {
    const mx::array block = mx::zeros({1, 2, 40'000, 4});
    const mx::array view = mx::slice(block, {0, 0, 0, 0}, {1, 2, 3, 4});
    cache.update_and_fetch(view, view);
    mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  }
  EXPECT_LE(std::get<DenseKV>(cache.keys_and_values()).keys.buffer_size(), 32'768u);
}

TEST(ConcatenateKVCache, P7TheLegacyPairRestores) {
  ConcatenateKVCache cache;
  append(cache, range(0, 6));
  cache.trim(2);
  const auto restored = ConcatenateKVCache::from_legacy(cache.legacy_state(), cache.legacy_meta());
  expect_holds(*restored, range(0, 4));
  EXPECT_EQ(error_of([&] { ConcatenateKVCache::from_legacy(cache.legacy_state(), Meta("6")); }).substr(0, 12),
            "corrupt_data");
}

TEST(ConcatenateKVCache, StatesThatCannotBeAreRefused) {
  const Rows five = rows(range(0, 5)), four = rows(range(0, 4));
  const State keys(five.keys), values(five.values);
  const State::List bad[] = {{},
                             {keys},
                             {keys, values, State(5)},
                             {keys, State()},
                             {State(), values},
                             {keys, State(four.values)},
                             {keys, State(5)},
                             {State(mx::astype(five.keys, mx::int32)), values},
                             {State(mx::squeeze(five.keys, 0)), values}};
  for (const State::List& state : bad) {
    EXPECT_EQ(error_of([&] { ConcatenateKVCache::from_state(state); }).substr(0, 12), "corrupt_data");
  }
}

}  // namespace
}  // namespace reprise
