// What an ArraysCache leaves in both layouts, and what it refuses to be made of.
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/array_slots.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

TEST(ArraysCache, StateHoldsEverythingAndRestores) {
  ArraysCache cache(2, {1, 0});
  cache.set(1, slot({1, 2}, mx::bfloat16));
  cache.prepare({.lengths = {3, 2}});
  cache.advance(2);
  const auto restored = cache_from_state("ArraysCache", cache.state());
  EXPECT_TRUE(identical(restored->state(), cache.state()));
  const auto& arrays = dynamic_cast<const ArraysCache&>(*restored);
  EXPECT_EQ(arrays.left_padding(), (std::vector<int>{-1, -2}));
  EXPECT_EQ(arrays.lengths(), (std::vector<int>{1, 0}));
  EXPECT_EQ(mask_of(arrays, 3), mask_of(cache, 3));
  EXPECT_TRUE(identical(cache.saved_state(), cache.state()));
}

TEST(ArraysCache, P7TheLegacyPairIsTheSlots) {
  ArraysCache cache(2);
  cache.set(0, slot({1}));
  cache.set(1, slot({2}));
  const auto restored = cache_from_legacy("ArraysCache", cache.legacy_state(), cache.legacy_meta());
  EXPECT_TRUE(identical(restored->state(), cache.state()));
  // A hole in the names of a file reads as an empty list.
  const State holes = State::List{State(State::List{}), State(slot({2}))};
  const auto with_hole = ArraysCache::from_legacy(holes, {});
  EXPECT_FALSE(with_hole->get(0));
  EXPECT_EQ(rows_in(*with_hole, 1), std::vector<int>{2});
}

TEST(ArraysCache, P4AMambaCacheIsAnArraysCacheOfTwoSlots) {
  EXPECT_EQ(MambaCache().num_slots(), 2);
  EXPECT_EQ(MambaCache({1, 0}).left_padding(), (std::vector<int>{1, 0}));
  EXPECT_EQ(MambaCache().class_name(), "ArraysCache");
  for (const State::List& slots :
       {State::List{State(slot({1})), State(slot({2}))}, State::List{State(slot({1}))}, State::List{}}) {
    const auto loaded = cache_from_legacy("MambaCache", slots, {});
    EXPECT_EQ(loaded->class_name(), "ArraysCache");
    EXPECT_EQ(dynamic_cast<const ArraysCache&>(*loaded).num_slots(), 2);
    EXPECT_EQ(loaded->empty(), slots.empty());
  }
  const State three = State::List{State(slot({1})), State(slot({1})), State(slot({1}))};
  EXPECT_EQ(error_of([&] { cache_from_legacy("MambaCache", three, {}); }).substr(0, 12), "corrupt_data");
  EXPECT_EQ(cache_from_state("MambaCache", MambaCache().state())->class_name(), "ArraysCache");
}

TEST(ArraysCache, P6AWrongStateIsNamed) {
  const auto ints = [](std::vector<int> values) {
    return State(mx::array(values.begin(), {static_cast<int>(values.size())}, mx::int32));
  };
  const std::vector<std::pair<State, std::string>> wrong = {
      {State(3), "state"},
      {State::List{State(State::List{}), State()}, "3 items"},
      {State::List{State(slot({1})), State(), State()}, "slots"},
      {State::List{State(State::List{State(4)}), State(), State()}, "slot 0"},
      {State::List{State(State::List{State(), State(mx::array(1.0f))}), State(), State()}, "slot 1"},
      {State::List{State(State::List{State(slot({1})), State(slot({1, 2}))}), State(), State()}, "slot 1"},
      {State::List{State(State::List{State(slot({1, 2}))}), ints({1}), State()}, "left_padding"},
      {State::List{State(State::List{State(slot({1, 2}))}), State(), ints({1, 2, 3})}, "lengths"},
      {State::List{State(State::List{State()}), ints({1, 2}), ints({1})}, "lengths"},
      {State::List{State(State::List{State()}), State(mx::ones({2})), State()}, "left_padding"},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const std::string error = error_of([&] { cache_from_state("ArraysCache", wrong[i].first); });
    EXPECT_EQ(error.substr(0, 12), "corrupt_data") << "case " << i;
    EXPECT_NE(error.find(wrong[i].second), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace reprise
