// Scans over the real columns of a padded batch: rows are what each is alone. Their arithmetic: tests/kernels.
#include "reprise/nn/ssm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr int kColumns = 9;

mx::array part(const mx::array& x, int row, int first, int last) {
  mx::Shape start(x.ndim(), 0);
  mx::Shape stop = x.shape();
  start[0] = row;
  stop[0] = row + 1;
  start[1] = first;
  stop[1] = last;
  return mx::slice(x, start, stop);
}

ScanInputs part(const ScanInputs& all, int row, int first, int last) {
  ScanInputs one{part(all.x, row, first, last), part(all.delta, row, first, last), part(all.b, row, first, last),
                 part(all.c, row, first, last)};
  one.gate = part(*all.gate, row, first, last);
  one.state = part(*all.state, row, 0, all.state->shape(1));
  return one;
}

void expect_near(const mx::array& got, const mx::array& want) {
  const auto a = test::floats(got), b = test::floats(want);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5f) << i;
}

// `scan` over three rows, the first whole, the others with real columns [first, last) alone.
template <typename Scan>
void expect_rows_alone(const ScanInputs& inputs, const Scan& scan, const std::vector<int>& first,
                       const std::vector<int>& last) {
  const mx::array from(first.data(), {3, 1}, mx::int32);
  const mx::array to(last.data(), {3, 1}, mx::int32);
  const mx::array column = mx::arange(0, kColumns, mx::int32);
  const RealColumns real{mx::logical_and(mx::greater_equal(column, from), mx::less(column, to))};
  const ScanResult got = scan(inputs, real);
  for (int row = 0; row < 3; ++row) {
    const auto i = static_cast<std::size_t>(row);
    const int stop = std::min(last[i], kColumns);
    const mx::array state = part(got.state, row, 0, got.state.shape(1));
    if (first[i] >= stop) {
      expect_near(state, part(*inputs.state, row, 0, got.state.shape(1)));
      continue;
    }
    const ScanResult want = scan(part(inputs, row, first[i], stop), RealColumns{});
    expect_near(part(got.y, row, first[i], stop), want.y);
    expect_near(state, want.state);
  }
}

template <typename Scan>
void expect_paddings(const ScanInputs& inputs, const Scan& scan) {
  expect_rows_alone(inputs, scan, {0, 2, 8}, {9, 9, 9});   // left
  expect_rows_alone(inputs, scan, {0, 0, 0}, {90, 4, 0});  // right
  expect_rows_alone(inputs, scan, {0, 3, 5}, {9, 6, 5});   // both
}

TEST(SelectiveScan, PaddedColumnsLeaveTheStateAsItWas) {
  const auto scan = std::make_shared<const SelectiveScan>(
      SelectiveScan{decay_rates(test::normal({6, 4}, 1)), test::normal({6}, 2), {.bias = test::normal({6}, 3)}});
  const ScanInputs inputs{.x = test::normal({3, kColumns, 6}, 4),
                          .delta = test::normal({3, kColumns, 6}, 5),
                          .b = test::normal({3, kColumns, 4}, 6),
                          .c = test::normal({3, kColumns, 4}, 7),
                          .gate = test::normal({3, kColumns, 6}, 8),
                          .state = test::normal({3, 6, 4}, 9)};
  expect_paddings(inputs,
                  [&](const ScanInputs& in, const RealColumns& real) { return selective_scan(in, scan, real); });
}

TEST(HeadScan, PaddedColumnsLeaveTheStateAsItWas) {
  const auto scan = std::make_shared<const HeadScan>(
      HeadScan{decay_rates(test::normal({4}, 1)), test::normal({4}, 2), 2, {.bias = test::normal({4}, 3)}});
  const ScanInputs inputs{.x = test::normal({3, kColumns, 12}, 4),
                          .delta = test::normal({3, kColumns, 4}, 5),
                          .b = test::normal({3, kColumns, 10}, 6),
                          .c = test::normal({3, kColumns, 10}, 7),
                          .gate = test::normal({3, kColumns, 12}, 8),
                          .state = test::normal({3, 4, 3, 5}, 9)};
  expect_paddings(inputs, [&](const ScanInputs& in, const RealColumns& real) { return head_scan(in, scan, real); });
}

TEST(DecayRates, AreNegativeAndFloat32) {
  const auto rates = decay_rates(mx::astype(mx::array({0.0f, 1.0f, -20.0f}), mx::bfloat16));
  EXPECT_EQ(rates.dtype(), mx::float32);
  const auto values = test::floats(rates);
  EXPECT_EQ(values[0], -1.0f);
  EXPECT_NEAR(values[1], -std::exp(1.0f), 1e-6f);
  EXPECT_LT(values[2], 0.0f);
}

}  // namespace
}  // namespace reprise
