#include "reprise/cache/arrays_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <functional>

#include "mlx/ops.h"
#include "tests/cache/array_slots.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

bool has_no_mask(const ArraysCache& cache) { return std::holds_alternative<NoMask>(cache.make_mask(3)); }

TEST(ArraysCache, ANewOneIsEmptyAndNeverTrims) {
  ArraysCache cache(2);
  EXPECT_EQ(cache.num_slots(), 2);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.position(), std::nullopt);
  EXPECT_TRUE(cache.positions().empty());
  EXPECT_EQ(cache.batch_size(), 1);
  EXPECT_EQ(cache.class_name(), "ArraysCache");
  EXPECT_TRUE(has_no_mask(cache));
  EXPECT_FALSE(cache.keeps_all_rows());
  EXPECT_TRUE(ArraysCache(0).empty());
  EXPECT_EQ(error_of([] { ArraysCache(-1); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([] { ArraysCache(1, {1, -1}); }).substr(0, 16), "invalid_argument");
}

TEST(ArraysCache, Z8TrimTakesNothingAway) {
  ArraysCache cache(2);
  cache.set(0, slot({1, 2}));
  const State before = cache.state();
  EXPECT_FALSE(cache.is_trimmable());
  EXPECT_EQ(cache.max_trim(), 0);
  for (const int n : {0, 1, 9}) EXPECT_EQ(cache.trim(n), 0);
  EXPECT_EQ(error_of([&] { cache.trim(-1); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(identical(cache.state(), before));
}

TEST(ArraysCache, SlotsAreSetAndUnset) {
  ArraysCache cache(2);
  cache.set(1, slot({4, 5}, mx::float16));
  EXPECT_TRUE(cache.empty());  // as mlx-lm: the first slot decides
  EXPECT_EQ(cache.batch_size(), 2);
  EXPECT_EQ(cache.nbytes(), 2u * 6u * 2u);
  cache.set(0, slot({4, 5}));
  EXPECT_FALSE(cache.empty());
  EXPECT_EQ(cache.nbytes(), 2u * 6u * 2u + 2u * 6u * 4u);
  EXPECT_TRUE(identical(*cache.get(1), slot({4, 5}, mx::float16)));
  cache.set(0, std::nullopt);
  EXPECT_TRUE(cache.empty());
  EXPECT_FALSE(cache.get(0));
  cache.set(1, slot({7}));  // the only slot: another number of rows is a new beginning
  EXPECT_EQ(cache.batch_size(), 1);
}

TEST(ArraysCache, Z3WhatDoesNotFitChangesNothing) {
  ArraysCache cache(2, {1, 0});
  cache.set(0, slot({1, 2}));
  cache.prepare({.lengths = {4, 2}});
  const State before = cache.state();
  ArraysCache other_slots(3), other_shape(2), other_dtype(2);
  other_shape.set(0, mx::ones({1, 3, 3}));
  other_dtype.set(0, slot({1}, mx::float16));
  const std::vector<std::function<void()>> calls = {
      [&] {
        cache.set(2, slot({1, 2}));
      },
      [&] {
        cache.set(-1, slot({1, 2}));
      },
      [&] {
        cache.set(1, slot({1, 2, 3}));
      },
      [&] { cache.set(1, mx::array(1.0f)); },
      [&] { cache.get(2); },
      [&] { cache.make_mask(0); },
      [&] { cache.advance(-1); },
      [&] { cache.prepare({.lengths = {1}}); },
      [&] {
        cache.prepare({.lengths = {1, -1}});
      },
      [&] {
        cache.filter({0, 2});
      },
      [&] { cache.filter({-1}); },
      [&] { cache.extract(2); },
      [&] { cache.extract(-1); },
      [&] { cache.extend(other_slots); },
      [&] { cache.extend(other_shape); },
      [&] { cache.extend(other_dtype); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(error_of(calls[i]).substr(0, 30), "invalid_argument: [ArraysCache") << "call " << i;
    EXPECT_TRUE(identical(cache.state(), before)) << "call " << i;
  }
  cache.set(1, slot({3, 4}));
  EXPECT_EQ(rows_in(cache, 1), (std::vector<int>{3, 4}));
}

TEST(ArraysCache, A1PrepareTakesLengthsAndNothingElse) {
  ArraysCache cache(1);
  cache.prepare({.left_padding = {1, 2}, .right_padding = {3, 0}});
  EXPECT_FALSE(cache.lengths());
  EXPECT_FALSE(cache.left_padding());
  cache.prepare({.left_padding = {1, 2}, .lengths = {5, 3}, .right_padding = {0, 2}});
  EXPECT_EQ(cache.lengths(), (std::vector<int>{5, 3}));
  EXPECT_FALSE(cache.left_padding());
  EXPECT_EQ(cache.batch_size(), 2);
  cache.prepare({.lengths = {1, 1}});
  EXPECT_EQ(cache.lengths(), (std::vector<int>{1, 1}));
  cache.finalize();
  EXPECT_FALSE(cache.lengths());
  EXPECT_EQ(cache.batch_size(), 2);
}

TEST(ArraysCache, A2AdvanceCountsBothDownBelowZero) {
  ArraysCache cache(1, {2, 0});
  cache.prepare({.lengths = {7, 3}});
  cache.advance(4);
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{-2, -4}));
  EXPECT_EQ(cache.lengths(), (std::vector<int>{3, -1}));
  cache.advance(0);
  EXPECT_EQ(cache.lengths(), (std::vector<int>{3, -1}));
  cache.advance(INT_MAX);
  cache.advance(INT_MAX);
  EXPECT_EQ(cache.lengths(), (std::vector<int>{INT_MIN, INT_MIN}));
  ArraysCache without(1);
  without.advance(4);
  EXPECT_TRUE(has_no_mask(without));
}

TEST(ArraysCache, A3MaskIsWhereAColumnIsBehindThePaddingAndWithinTheLength) {
  for (const Counts& left : {Counts{}, Counts{{2, 0, -1}}, Counts{{0, 5, 1}}}) {
    for (const Counts& lengths : {Counts{}, Counts{{3, 1, 0}}, Counts{{9, -2, 4}}}) {
      const auto counts = [](const Counts& values) {
        return values ? State(mx::array(values->begin(), {3}, mx::int32)) : State();
      };
      const auto cache =
          ArraysCache::from_state(State::List{State(State::List{State()}), counts(left), counts(lengths)});
      if (!left && !lengths) {
        EXPECT_TRUE(has_no_mask(*cache));
        continue;
      }
      for (const int N : {1, 4}) {
        std::vector<std::vector<bool>> expected(3, std::vector<bool>(static_cast<std::size_t>(N)));
        for (std::size_t b = 0; b < 3; ++b) {
          for (int pos = 0; pos < N; ++pos)
            expected[b][static_cast<std::size_t>(pos)] =
                (!left || pos >= (*left)[b]) && (!lengths || pos < (*lengths)[b]);
        }
        EXPECT_EQ(mask_of(*cache, N), expected);
      }
    }
  }
}

TEST(ArraysCache, A4FilterChoosesRowsOfEverythingAndUnsetStaysUnset) {
  ArraysCache cache(3, {2, 0, 1});
  cache.set(0, slot({10, 11, 12}));
  cache.set(2, slot({20, 21, 22}));
  cache.prepare({.lengths = {5, 6, 7}});
  cache.filter({2, 0, 2});
  EXPECT_EQ(rows_in(cache, 0), (std::vector<int>{12, 10, 12}));
  EXPECT_FALSE(cache.get(1));
  EXPECT_EQ(rows_in(cache, 2), (std::vector<int>{22, 20, 22}));
  EXPECT_EQ(cache.left_padding(), (std::vector<int>{1, 2, 1}));
  EXPECT_EQ(cache.lengths(), (std::vector<int>{7, 5, 7}));
  cache.filter({});
  EXPECT_EQ(cache.batch_size(), 0);
  EXPECT_EQ(cache.get(0)->shape(), (mx::Shape{0, 2, 3}));
  ArraysCache more(3);
  more.set(0, slot({5}));
  cache.extend(more);
  EXPECT_EQ(rows_in(cache, 0), std::vector<int>{5});
  EXPECT_EQ(rows_in(cache, 2), std::vector<int>{0});
}

TEST(ArraysCache, A4RowsOfACacheWithNothingSetAreCountedOnceKnown) {
  ArraysCache cache(1);
  EXPECT_EQ(cache.rows(), std::nullopt);
  cache.filter({4, 1});  // nobody knows yet how many there are
  EXPECT_EQ(cache.batch_size(), 2);
  EXPECT_EQ(error_of([&] { cache.filter({2}); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { cache.set(0, slot({1})); }).substr(0, 16), "invalid_argument");
  ArraysCache other(1);
  other.set(0, slot({8}));
  auto restored = ArraysCache::from_state(cache.state());
  restored->set_extra_state(cache.extra_state());
  restored->extend(other);
  EXPECT_EQ(rows_in(*restored, 0), (std::vector<int>{0, 0, 8}));
  EXPECT_TRUE(restored->extra_state().empty());
  EXPECT_EQ(error_of([&] { restored->set_extra_state({{"rows", std::int64_t{2}}}); }).substr(0, 12), "corrupt_data");
  EXPECT_EQ(error_of([&] { cache.set_extra_state({{"columns", std::int64_t{2}}}); }).substr(0, 12), "corrupt_data");
}

TEST(ArraysCache, A5ExtendFillsUnsetSlotsOfOneSideWithZeros) {
  ArraysCache cache(3);
  ArraysCache other(3);
  cache.set(0, slot({1, 2}));
  cache.set(1, slot({3, 4}));
  other.set(1, slot({5}));
  const State other_before = other.state();
  cache.extend(other);
  EXPECT_EQ(rows_in(cache, 0), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(rows_in(cache, 1), (std::vector<int>{3, 4, 5}));
  EXPECT_FALSE(cache.get(2));
  EXPECT_TRUE(has_no_mask(cache));
  EXPECT_TRUE(identical(other.state(), other_before));
  other.extend(cache);
  EXPECT_EQ(rows_in(other, 0), (std::vector<int>{0, 1, 2, 0}));
  other.extend(other);
  EXPECT_EQ(rows_in(other, 1), (std::vector<int>{5, 3, 4, 5, 5, 3, 4, 5}));
}

// Trap 12: whichever side has nothing, the other's rows stay what they are.
TEST(ArraysCache, A5EmptyAndFilledBatchesExtendInBothOrders) {
  for (const int empty_rows : {1, 3}) {
    for (const int filled_rows : {1, 3}) {
      const std::vector<int> zeros(static_cast<std::size_t>(empty_rows), 0);
      std::vector<int> numbers = range(5, 5 + filled_rows);
      for (const bool empty_first : {true, false}) {
        ArraysCache empty(1, zeros);
        ArraysCache filled(1);
        filled.set(0, slot(numbers));
        ArraysCache& cache = empty_first ? empty : filled;
        cache.extend(empty_first ? filled : empty);
        std::vector<int> expected = empty_first ? zeros : numbers;
        for (const int row : empty_first ? numbers : zeros) expected.push_back(row);
        EXPECT_EQ(rows_in(cache, 0), expected);
        const std::vector<int> lengths = range(1, empty_rows + filled_rows + 1);
        cache.prepare({.lengths = lengths});
        const auto mask = mask_of(cache, 8);
        for (std::size_t b = 0; b < mask.size(); ++b)
          EXPECT_EQ(std::count(mask[b].begin(), mask[b].end(), true), lengths[b]);
      }
    }
  }
}

TEST(ArraysCache, A5ARowWithoutLengthsHasNoLimitEverAndWithoutPaddingNone) {
  for (const bool first : {true, false}) {
    ArraysCache limited(1, {1, 0});
    limited.set(0, slot({1, 2}));
    limited.prepare({.lengths = {2, 3}});
    ArraysCache free(1);
    free.set(0, slot({3}));
    ArraysCache& cache = first ? limited : free;
    cache.extend(first ? free : limited);
    const std::vector<bool> unlimited(4, true), one{false, true, false, false}, two{true, true, true, false};
    EXPECT_EQ(mask_of(cache, 4), (first ? std::vector<std::vector<bool>>{one, two, unlimited}
                                        : std::vector<std::vector<bool>>{unlimited, one, two}));
    for (int i = 0; i < 3; ++i) cache.advance(INT_MAX / 2);
    const std::vector<bool> none(4, false);
    EXPECT_EQ(mask_of(cache, 4), (first ? std::vector<std::vector<bool>>{none, none, unlimited}
                                        : std::vector<std::vector<bool>>{unlimited, none, none}));
  }
}

TEST(ArraysCache, A6ExtractCopiesOneRowWithoutPaddingsAndUnsetStaysUnset) {
  ArraysCache cache(2, {0, 1});
  cache.set(1, slot({6, 7}));
  cache.prepare({.lengths = {3, 4}});
  const auto single = cache.extract(1);
  const auto& row = dynamic_cast<const ArraysCache&>(*single);
  EXPECT_FALSE(row.get(0));
  EXPECT_EQ(rows_in(row, 1), std::vector<int>{7});
  EXPECT_TRUE(has_no_mask(row));
  EXPECT_TRUE(ArraysCache(2).extract(0)->empty());
}

TEST(ArraysCache, A7MergeTakesEachSlotForItself) {
  ArraysCache first(3);
  ArraysCache second(3);
  first.set(1, slot({4}));
  second.set(2, slot({5}));
  second.prepare({.lengths = {3}});
  const auto merged = merge_caches({&first, &second});
  const auto& batch = dynamic_cast<const ArraysCache&>(*merged);
  EXPECT_FALSE(batch.get(0));
  EXPECT_EQ(rows_in(batch, 1), (std::vector<int>{4, 0}));
  EXPECT_EQ(rows_in(batch, 2), (std::vector<int>{0, 5}));
  EXPECT_TRUE(has_no_mask(batch));
  for (int row = 0; row < 2; ++row) {
    const auto single = batch.extract(row);
    EXPECT_EQ(rows_in(dynamic_cast<const ArraysCache&>(*single), 1 + row), std::vector<int>{4 + row});
  }
}

TEST(ArraysCache, A7OnlyWhenAllOfAllIsUnsetIsThereZeroPadding) {
  const ArraysCache a(2), b(2), c(2);
  const auto merged = merge_caches({&a, &b, &c});
  const auto& batch = dynamic_cast<const ArraysCache&>(*merged);
  EXPECT_EQ(batch.left_padding(), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(batch.batch_size(), 3);
  EXPECT_FALSE(batch.get(1));
}

TEST(ArraysCache, A7MergeRefusesWhatDiffers) {
  ArraysCache a(2), slots(3), shape(2), rows(2);
  a.set(0, slot({1}));
  shape.set(0, mx::ones({1, 2, 4}));
  rows.set(0, slot({1, 2}));
  for (const ArraysCache* other : {&slots, &shape, &rows})
    EXPECT_EQ(error_of([&] { merge_caches({&a, other}); }).substr(0, 16), "invalid_argument");
}

TEST(ArraysCache, Z2ArraysHandedOutStayWhatTheyWere) {
  ArraysCache cache(1, {1, 0});
  mx::array given = slot({1, 2});
  given.eval();
  cache.set(0, given);
  const mx::array read = *cache.get(0);
  const mx::array mask = std::get<mx::array>(cache.make_mask(3));
  const State state = cache.state();
  for (int i = 0; i < 5; ++i) {
    mx::array next = *cache.get(0) * 2.0f + 1.0f;
    next.eval();
    cache.set(0, next);
    cache.advance(1);
  }
  cache.filter({1, 0});
  EXPECT_TRUE(identical(given, slot({1, 2})));
  EXPECT_TRUE(identical(read, slot({1, 2})));
  EXPECT_TRUE(identical(*(*(*state.as_list())[0].as_list())[0].as_array(), slot({1, 2})));
  EXPECT_TRUE(identical(mask, std::get<mx::array>(ArraysCache(1, {1, 0}).make_mask(3))));
}

TEST(ArraysCache, X1ForksAreIndependent) {
  ArraysCache parent(1, {1, 0});
  parent.set(0, slot({1, 2}));
  const auto fork = parent.fork();
  auto& child = dynamic_cast<ArraysCache&>(*fork);
  child.set(0, slot({3, 4}));
  child.advance(5);
  parent.filter({1});
  EXPECT_EQ(rows_in(child, 0), (std::vector<int>{3, 4}));
  EXPECT_EQ(child.left_padding(), (std::vector<int>{-4, -5}));
  EXPECT_EQ(rows_in(parent, 0), std::vector<int>{2});
  EXPECT_EQ(parent.left_padding(), std::vector<int>{0});
}

}  // namespace
}  // namespace reprise
