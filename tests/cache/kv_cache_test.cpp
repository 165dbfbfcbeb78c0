#include "reprise/cache/kv_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// Capacity by mlx-lm's growth rule, told by the bytes.
std::size_t columns(const KVCache& cache, const RowShape& shape = {}) {
  const std::size_t row_bytes =
      static_cast<std::size_t>(shape.batch * shape.heads * (shape.key_size + shape.value_size)) *
      mx::size_of(shape.dtype);
  EXPECT_EQ(cache.nbytes() % row_bytes, 0u);
  return cache.nbytes() / row_bytes;
}

// Every way of reading agrees with `tokens`.
void expect_holds(const KVCache& cache, const std::vector<int>& tokens) {
  const auto count = static_cast<int>(tokens.size());
  EXPECT_EQ(std::get<int>(cache.offset()), count);
  EXPECT_EQ(cache.position(), count);
  EXPECT_EQ(cache.length(), count);
  EXPECT_EQ(cache.size(), count);
  EXPECT_EQ(cache.max_trim(), count);
  EXPECT_TRUE(cache.is_trimmable());
  EXPECT_FALSE(cache.empty());
  EXPECT_EQ(tokens_of(cache.keys_and_values()), tokens);
  EXPECT_EQ(tokens_of(*(*cache.saved_state().as_list())[0].as_array()), tokens);
  EXPECT_EQ(tokens_of(*(*cache.legacy_state().as_list())[1].as_array()), tokens);
  EXPECT_EQ(*(*cache.state().as_list())[2].as_int(), count);
}

TEST(KVCache, ANewOneIsEmpty) {
  KVCache cache;
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.position(), 0);
  EXPECT_EQ(cache.max_trim(), 0);
  EXPECT_TRUE(cache.is_trimmable());
  EXPECT_EQ(cache.trim(3), 0);
  EXPECT_EQ(error_of([&] { cache.keys_and_values(); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(cache.class_name(), "KVCache");
}

TEST(KVCache, K1CapacityGrowsByMlxLmsRule) {
  struct Step {
    int rows;
    std::size_t columns;
  };
  const std::vector<std::vector<Step>> scripts = {
      {{255, 256}, {1, 256}, {1, 512}},
      {{256, 256}, {1, 512}, {255, 512}, {1, 768}},
      {{257, 512}, {255, 512}, {1, 768}},
      {{512, 512}, {1, 768}},
      {{5, 256}, {252, 5 + 256}, {4, 5 + 256}, {1, 261 + 256}, {300, 262 + 512}},
  };
  for (const auto& script : scripts) {
    KVCache cache;
    int total = 0;
    for (const Step& step : script) {
      const KeysValues seen = append(cache, range(total, total + step.rows));
      total += step.rows;
      EXPECT_EQ(tokens_of(seen), range(0, total));
      EXPECT_EQ(columns(cache), step.columns) << "after " << total << " rows";
    }
    expect_holds(cache, range(0, total));
  }
}

TEST(KVCache, K1SlackStaysWhenTheOffsetIsAMultipleOfTheStep) {
  KVCache cache;
  append(cache, range(0, 300));  // 512 columns
  EXPECT_EQ(cache.trim(44), 44);
  append(cache, range(1000, 1300));  // 256 is a multiple: the 512 columns stay, 512 more come
  EXPECT_EQ(columns(cache), 1024u);
  std::vector<int> expected = range(0, 256);
  for (int token : range(1000, 1300)) expected.push_back(token);
  expect_holds(cache, expected);
}

TEST(KVCache, K2ValuesMayBeOfAnotherSizeAndRowsMayBeSeveral) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const RowShape shape{.batch = 3, .heads = 2, .key_size = 6, .value_size = 2, .dtype = dtype};
    KVCache cache;
    append(cache, range(0, 5), shape);
    const auto seen = std::get<DenseKV>(append(cache, range(5, 6), shape));
    EXPECT_EQ(seen.keys.shape(), (mx::Shape{3, 2, 6, 6}));
    EXPECT_EQ(seen.values.shape(), (mx::Shape{3, 2, 6, 2}));
    EXPECT_EQ(seen.keys.dtype(), dtype);
    EXPECT_EQ(columns(cache, shape), 256u);
    expect_holds(cache, range(0, 6));
  }
}

TEST(KVCache, K3QuantisedKeepsOffsetAndCapacityAndLeavesTheOriginal) {
  const RowShape shape{.key_size = 32, .value_size = 64};
  KVCache cache;
  append(cache, range(0, 3), shape);
  const State before = cache.state();
  const auto quantized = cache.to_quantized(32, 8);
  EXPECT_EQ(quantized->class_name(), "QuantizedKVCache");
  EXPECT_EQ(quantized->position(), 3);
  const State state = quantized->state();
  EXPECT_EQ((*(*state.as_list())[0].as_list())[0].as_array()->shape(2), KVCache::kStep);
  EXPECT_TRUE(identical(cache.state(), before));

  EXPECT_TRUE(KVCache().to_quantized(32, 4)->empty());
  EXPECT_EQ(error_of([&] { cache.to_quantized(64, 8); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { cache.to_quantized(32, 7); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { cache.to_quantized(48, 8); }).substr(0, 16), "invalid_argument");
}

TEST(KVCache, K4SavedStateHoldsNoTrimmedRows) {
  KVCache cache;
  append(cache, range(0, 9));
  cache.trim(4);
  const State saved = cache.saved_state();
  EXPECT_EQ((*saved.as_list())[0].as_array()->shape(2), 5);
  const auto restored = cache_from_state("KVCache", saved);
  EXPECT_EQ(tokens_of(static_cast<KVCache&>(*restored).keys_and_values()), range(0, 5));
}

TEST(KVCache, Z8TrimForgetsTheLastTokens) {
  for (const int n : {0, 1, 6, 7, 16}) {
    KVCache cache;
    append(cache, range(0, 7));
    const int trimmed = std::min(n, 7);
    EXPECT_EQ(cache.trim(n), trimmed);
    expect_holds(cache, range(0, 7 - trimmed));
    // As if the tokens had never been given.
    append(cache, range(100, 103));
    std::vector<int> expected = range(0, 7 - trimmed);
    for (int token : range(100, 103)) expected.push_back(token);
    expect_holds(cache, expected);
    EXPECT_EQ(columns(cache), 256u);
  }
}

TEST(KVCache, Z8ACacheTrimmedToNothingIsNotEmpty) {
  KVCache cache;
  append(cache, range(0, 7));
  EXPECT_EQ(cache.trim(100), 7);
  EXPECT_FALSE(cache.empty());
  EXPECT_EQ(columns(cache), 256u);
  EXPECT_EQ(tokens_of(cache.keys_and_values()), std::vector<int>{});
  const auto restored = KVCache::from_state(cache.saved_state());
  EXPECT_FALSE(restored->empty());
  append(*restored, range(3, 5));
  expect_holds(*restored, range(3, 5));
}

TEST(KVCache, Z8NegativeTrimThrowsAndChangesNothing) {
  KVCache cache;
  append(cache, range(0, 7));
  EXPECT_EQ(error_of([&] { cache.trim(-1); }), "invalid_argument: [KVCache::trim] n must not be negative, but got -1");
  expect_holds(cache, range(0, 7));
}

TEST(KVCache, Z5NoRowsGiveTheStoredOnesAndChangeNothing) {
  KVCache cache;
  EXPECT_EQ(error_of([&] { append(cache, {}); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(cache.empty());
  append(cache, range(0, 5));
  EXPECT_EQ(tokens_of(append(cache, {})), range(0, 5));
  expect_holds(cache, range(0, 5));
}

TEST(KVCache, Z3MismatchesThrowAndChangeNothing) {
  KVCache cache;
  append(cache, range(0, 5));
  const State before = cache.state();
  const std::vector<RowShape> wrong = {{.batch = 2},      {.heads = 1},           {.key_size = 3},
                                       {.value_size = 5}, {.dtype = mx::float16}, {.batch = 1, .heads = 0}};
  for (const RowShape& shape : wrong) {
    EXPECT_EQ(error_of([&] { append(cache, range(5, 7), shape); }).substr(0, 16), "invalid_argument");
    EXPECT_TRUE(identical(cache.state(), before));
  }
  const Rows two = rows(range(5, 7)), three = rows(range(5, 8));
  EXPECT_NE(error_of([&] { cache.update_and_fetch(two.keys, three.values); }), "nothing");
  EXPECT_NE(error_of([&] { cache.update_and_fetch(mx::squeeze(two.keys, 0), two.values); }), "nothing");
  EXPECT_NE(error_of([&] { cache.update_and_fetch(two.keys, mx::squeeze(two.values, 0)); }), "nothing");
  EXPECT_NE(error_of([&] { cache.make_mask(0); }), "nothing");
  EXPECT_NE(error_of([&] { cache.make_mask(1, {.window = 0}); }), "nothing");
  EXPECT_TRUE(identical(cache.state(), before));
  append(cache, range(5, 7));
  expect_holds(cache, range(0, 7));
}

TEST(KVCache, Z5IntegersAreNoKeys) {
  KVCache cache;
  const mx::array ints = mx::zeros({1, 2, 3, 4}, mx::int32);
  EXPECT_EQ(error_of([&] { cache.update_and_fetch(ints, ints); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(cache.empty());
}

TEST(KVCache, Z2ArraysHandedOutAreValues) {
  for (const int start : {5, 255, 256}) {
    for (const bool evaluated : {false, true}) {
      KVCache cache;
      const Rows given = rows(range(0, start));
      const KeysValues first = cache.update_and_fetch(given.keys, given.values);
      const State state = cache.state();
      const Mask mask = cache.make_mask(3, {.return_array = true});
      const Offset offset = cache.offset();
      if (evaluated) mx::eval(std::get<DenseKV>(first).keys, std::get<DenseKV>(first).values);
      cache.trim(2);
      for (int i = 0; i < 5; ++i) {
        append(cache, {500 + i});
        if (evaluated) mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys);
      }
      EXPECT_EQ(tokens_of(first), range(0, start)) << start;
      EXPECT_EQ(tokens_of(DenseKV{given.keys, given.values}), range(0, start));
      EXPECT_EQ(tokens_of(mx::slice(*(*state.as_list())[0].as_array(), {0, 0, 0, 0}, {1, 2, start, 4})),
                range(0, start));
      EXPECT_EQ(std::get<mx::array>(mask).shape(), (mx::Shape{3, start + 3}));
      EXPECT_EQ(std::get<int>(offset), start);
    }
  }
}

TEST(KVCache, Z2CachesRestoredFromOneStateAreIndependent) {
  KVCache cache;
  append(cache, range(0, 5));
  const State state = cache.state();
  const auto a = KVCache::from_state(state), b = KVCache::from_state(state);
  append(*a, {100});
  append(*b, {200, 201});
  append(cache, {300});
  EXPECT_EQ(tokens_of(a->keys_and_values()), (std::vector<int>{0, 1, 2, 3, 4, 100}));
  EXPECT_EQ(tokens_of(b->keys_and_values()), (std::vector<int>{0, 1, 2, 3, 4, 200, 201}));
  EXPECT_EQ(tokens_of(cache.keys_and_values()), (std::vector<int>{0, 1, 2, 3, 4, 300}));
}

TEST(KVCache, X1ForksAreIndependentWhicheverWritesFirst) {
  for (const bool parent_first : {false, true}) {
    auto parent = std::make_unique<KVCache>();
    append(*parent, range(0, 5));
    const auto child = parent->fork();
    auto& fork = static_cast<KVCache&>(*child);
    if (parent_first) append(*parent, {100});
    append(fork, {200});
    if (!parent_first) append(*parent, {100});
    EXPECT_EQ(fork.trim(3), 3);
    append(fork, {201});
    expect_holds(*parent, {0, 1, 2, 3, 4, 100});
    expect_holds(fork, {0, 1, 2, 201});
    parent.reset();
    append(fork, {202});
    expect_holds(fork, {0, 1, 2, 201, 202});
  }
}

TEST(KVCache, P7TheLegacyPairRestores) {
  KVCache cache;
  append(cache, range(0, 5));
  const auto restored = KVCache::from_legacy(cache.legacy_state(), cache.legacy_meta());
  expect_holds(*restored, range(0, 5));
  append(*restored, {5});
  expect_holds(*restored, range(0, 6));
  EXPECT_TRUE(KVCache::from_legacy(KVCache().legacy_state(), {})->empty());
}

TEST(KVCache, StatesThatCannotBeAreRefused) {
  const Rows five = rows(range(0, 5)), four = rows(range(0, 4));
  const State keys(five.keys), values(five.values);
  const State::List bad[] = {
      {},
      {keys, values},
      {keys, values, State(5), State(1)},
      {keys, values, State(6)},
      {keys, values, State(-1)},
      {keys, values, State(std::int64_t{1} << 40)},
      {keys, values, State(5.0)},
      {keys, values, State(true)},
      {keys, values, State()},
      {keys, State(), State(0)},
      {State(), values, State(0)},
      {State(), State(), State(1)},
      {keys, State(four.values), State(4)},
      {keys, State("values"), State(5)},
      {State(mx::squeeze(five.keys, 0)), values, State(5)},
      {State(mx::astype(five.keys, mx::int32)), values, State(5)},
      {State(mx::zeros({1, 2, 5, 0})), values, State(5)},
  };
  for (const State::List& state : bad) {
    EXPECT_EQ(error_of([&] { KVCache::from_state(state); }).substr(0, 12), "corrupt_data");
  }
  EXPECT_EQ(error_of([&] { KVCache::from_state(State(5)); }).substr(0, 12), "corrupt_data");
  EXPECT_EQ(error_of([&] {
              KVCache::from_state(State(State::List{keys, values, State(6)}));
            }),
            "corrupt_data: [KVCache::from_state] item 2 (offset) must be an integer and lie in [0, 5], but got the "
            "integer 6");
  EXPECT_EQ(error_of([&] {
              KVCache::from_legacy(State(State::List{keys, values}), Meta("5"));
            }).substr(0, 12),
            "corrupt_data");
  EXPECT_EQ(error_of([&] { KVCache::from_legacy(State(State::List{keys}), {}); }).substr(0, 12), "corrupt_data");
}

TEST(KVCache, M4MasksFollowTheStoredRows) {
  KVCache cache;
  append(cache, range(0, 5));
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1)));
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(2)));
  EXPECT_EQ(std::get<mx::array>(cache.make_mask(2, {.return_array = true})).shape(), (mx::Shape{2, 7}));
  EXPECT_EQ(std::get<mx::array>(cache.make_mask(1, {.window = 3})).shape(), (mx::Shape{1, 6}));
}

}  // namespace
}  // namespace reprise
