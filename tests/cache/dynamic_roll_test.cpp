#include "reprise/cache/dynamic_roll.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

mx::array numbers(const mx::Shape& shape, mx::Dtype dtype = mx::float32) {
  int size = 1;
  for (const int length : shape) size *= length;
  return mx::astype(mx::reshape(mx::arange(0, size, mx::int32), shape), dtype);
}

mx::array ints(const std::vector<int>& values, mx::Shape shape) {
  return mx::array(values.begin(), std::move(shape), mx::int32);
}

// Element by element: out[b, …, (i + shift) mod n, …] = x[b, …, i, …].
mx::array rolled_by_loop(const mx::array& x, const std::vector<int>& shifts, int axis) {
  std::vector<float> out(x.size());
  mx::array source = mx::contiguous(mx::astype(x, mx::float32));
  source.eval();
  std::size_t inner = 1, outer = 1;
  for (int i = axis + 1; i < static_cast<int>(x.ndim()); ++i) inner *= static_cast<std::size_t>(x.shape(i));
  for (int i = 1; i < axis; ++i) outer *= static_cast<std::size_t>(x.shape(i));
  const int n = x.shape(axis);
  for (std::size_t b = 0; b < static_cast<std::size_t>(x.shape(0)); ++b) {
    const int shift = shifts[shifts.size() == 1 ? 0 : b];
    for (std::size_t o = 0; o < outer; ++o) {
      for (int i = 0; i < n; ++i) {
        const int to = ((i + shift) % n + n) % n;
        for (std::size_t k = 0; k < inner; ++k) {
          const std::size_t row = (b * outer + o) * static_cast<std::size_t>(n);
          out[(row + static_cast<std::size_t>(to)) * inner + k] =
              source.data<float>()[(row + static_cast<std::size_t>(i)) * inner + k];
        }
      }
    }
  }
  return mx::astype(mx::array(out.begin(), x.shape(), mx::float32), x.dtype());
}

TEST(DynamicRoll, B10EachRowRollsByItsOwnShift) {
  struct Case {
    mx::Shape shape;
    int axis;
  };
  const std::vector<Case> cases = {{{3, 5}, 1},          {{3, 5, 2}, 1},      {{3, 2, 5}, 2}, {{3, 5, 2, 4}, 1},
                                   {{3, 2, 5, 4}, 2},    {{3, 2, 4, 5}, 3},   {{3, 1, 1}, 2}, {{3, 2, 5, 2, 3}, 2},
                                   {{3, 5, 1, 2, 3}, 1}, {{3, 2, 2, 2, 5}, 4}};
  for (const Case& c : cases) {
    const int n = c.shape[static_cast<std::size_t>(c.axis)];
    const mx::array x = numbers(c.shape);
    for (const std::vector<int>& shifts : std::vector<std::vector<int>>{
             {0, 1, n - 1}, {n, n + 3, -2}, {1, 1, 1}, {-2, 0, 1}, {-n, 2 * n + 1, -3 * n - 1}}) {
      const mx::array expected = rolled_by_loop(x, shifts, c.axis);
      EXPECT_TRUE(identical(dynamic_roll(x, ints(shifts, {3}), c.axis), expected));
      EXPECT_TRUE(identical(dynamic_roll(x, ints(shifts, {3, 1}), c.axis), expected));
    }
  }
}

TEST(DynamicRoll, B10OneShiftServesAllRows) {
  const mx::array x = numbers({3, 2, 5, 4});
  for (const int shift : {0, 1, 4, 5, 8, -2}) {
    const mx::array expected = rolled_by_loop(x, {shift}, 2);
    EXPECT_TRUE(identical(dynamic_roll(x, mx::array(shift), 2), expected));
    EXPECT_TRUE(identical(dynamic_roll(x, ints({shift}, {1}), 2), expected));
    EXPECT_TRUE(identical(dynamic_roll(x, ints({shift}, {1, 1}), 2), expected));
  }
}

TEST(DynamicRoll, B10NoShiftIsTooFar) {
  const int lowest = std::numeric_limits<int>::min(), highest = std::numeric_limits<int>::max();
  const mx::array x = numbers({4, 7});
  const auto modulo = [](int shift) { return static_cast<int>(std::int64_t{shift} % 7); };
  EXPECT_TRUE(
      identical(dynamic_roll(x, ints({lowest, highest, lowest + 1, highest - 1}, {4}), 1),
                rolled_by_loop(x, {modulo(lowest), modulo(highest), modulo(lowest + 1), modulo(highest - 1)}, 1)));
}

TEST(DynamicRoll, B10EveryDtypeKeepsItsValues) {
  for (const mx::Dtype dtype : {mx::float16, mx::bfloat16, mx::uint32, mx::bool_}) {
    const mx::array x = numbers({2, 3, 4}, dtype);
    EXPECT_TRUE(identical(dynamic_roll(x, ints({1, -1}, {2}), 1), rolled_by_loop(x, {1, -1}, 1)));
  }
}

TEST(DynamicRoll, B10TheInputStaysAndNothingRollsToNothing) {
  const mx::array x = numbers({2, 3});
  const mx::array rolled = dynamic_roll(x, ints({1, 2}, {2}), 1);
  EXPECT_FALSE(identical(rolled, x));
  EXPECT_TRUE(identical(x, numbers({2, 3})));
  EXPECT_EQ(dynamic_roll(mx::zeros({0, 2, 3}), ints({}, {0}), 1).shape(), (mx::Shape{0, 2, 3}));
  EXPECT_EQ(dynamic_roll(mx::zeros({2, 0, 3}), ints({1, 2}, {2}), 1).shape(), (mx::Shape{2, 0, 3}));
}

TEST(DynamicRoll, B10ShiftsAndAxesThatDoNotFitAreRefused) {
  const mx::array x = numbers({3, 2, 5});
  for (const int axis : {-1, 0, 3}) {
    EXPECT_EQ(error_of([&] { dynamic_roll(x, ints({1, 2, 3}, {3}), axis); }).substr(0, 16), "invalid_argument");
  }
  for (const mx::array& shifts : {ints({1, 2}, {2}), ints({1, 2, 3}, {1, 3}), ints({1, 2, 3}, {3, 1, 1}),
                                  mx::astype(ints({1, 2, 3}, {3}), mx::float32)}) {
    EXPECT_EQ(error_of([&] { dynamic_roll(x, shifts, 1); }).substr(0, 16), "invalid_argument");
  }
}

}  // namespace
}  // namespace reprise
