// The short convolution against a plain loop, with paddings and from chunk to chunk.
#include "reprise/nn/short_conv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "reprise/base/error.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

// Output and state of one row: `inputs` [n, C] are the state's and then the real ones.
struct Row {
  std::vector<double> output;
  std::vector<double> state;
};

Row loop(const std::vector<double>& inputs, const std::vector<float>& weight, const std::vector<float>& bias, int C,
         int K) {
  const int L = static_cast<int>(inputs.size()) / C - (K - 1);
  const auto at = [](int i) { return static_cast<std::size_t>(i); };
  Row row;
  for (int t = 0; t < L; ++t) {
    for (int c = 0; c < C; ++c) {
      double sum = bias.empty() ? 0.0 : static_cast<double>(bias[at(c)]);
      for (int k = 0; k < K; ++k) sum += static_cast<double>(weight[at(c * K + k)]) * inputs[at((t + k) * C + c)];
      row.output.push_back(sum);
    }
  }
  row.state.assign(inputs.end() - (K - 1) * C, inputs.end());
  return row;
}

void expect_near(const mx::array& got, const std::vector<double>& want) {
  const auto values = test::floats(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(values[i], want[i], 1e-5) << i;
}

std::vector<double> doubles(const mx::array& x) {
  const auto values = test::floats(x);
  return {values.begin(), values.end()};
}

TEST(ShortConv, EqualsALoopAndChunksEqualOneCall) {
  constexpr int C = 5, L = 9;
  for (const int K : {1, 2, 4}) {
    SCOPED_TRACE(K);
    const auto x = test::normal({1, L, C}, 1);
    const auto weight = test::normal({C, K}, 2);
    const auto bias = test::normal({C}, 3);
    std::vector<double> inputs(static_cast<std::size_t>((K - 1) * C), 0.0);
    for (const double value : doubles(x)) inputs.push_back(value);
    const Row want = loop(inputs, test::floats(weight), test::floats(bias), C, K);
    const ShortConv conv{.weight = weight, .bias = bias};
    const auto whole = conv(x, {});
    expect_near(whole.output, want.output);
    expect_near(whole.state, want.state);

    std::optional<mx::array> state;
    std::vector<mx::array> outputs;
    for (int at = 0; at < L;) {
      const int end = std::min(L, at == 0 ? 1 : at + 3);
      const auto part = conv(mx::slice(x, {0, at, 0}, {1, end, C}), state);
      outputs.push_back(part.output);
      state = part.state;
      at = end;
    }
    expect_near(mx::concatenate(outputs, 1), want.output);
    expect_near(*state, want.state);
  }
}

TEST(ShortConv, PaddedColumnsAreAsIfTheyWereNotThere) {
  constexpr int C = 3, K = 4, L = 7;
  const auto weight = test::normal({C, K}, 4);
  const ShortConv conv{.weight = weight};
  const auto before = test::normal({2, K - 1, C}, 5);
  const auto x = test::normal({2, L, C}, 6);
  const std::vector<float> none;
  // Right padding: 5 real columns, and none at all in this chunk.
  for (const int length : {5, 2, 0, -3}) {
    SCOPED_TRACE(length);
    const int real = std::max(length, 0);
    const mx::array lengths(std::vector<int>{L, length}.data(), {2, 1}, mx::int32);
    const RealColumns columns{mx::less(mx::arange(0, L, mx::int32), lengths), std::vector<int>{L + 40, length}};
    const auto got = conv(x, before, columns);
    for (const int row : {0, 1}) {
      const int count = row == 0 ? L : real;
      auto inputs = doubles(mx::slice(before, {row, 0, 0}, {row + 1, K - 1, C}));
      for (const double value : doubles(mx::slice(x, {row, 0, 0}, {row + 1, count, C}))) inputs.push_back(value);
      const Row want = loop(inputs, test::floats(weight), none, C, K);
      expect_near(mx::slice(got.output, {row, 0, 0}, {row + 1, count, C}), want.output);
      expect_near(mx::slice(got.state, {row, 0, 0}, {row + 1, K - 1, C}), want.state);
    }
  }
  // Left padding, of a row that begins here.
  const mx::array padding(std::vector<int>{0, 3}.data(), {2, 1}, mx::int32);
  const auto got = conv(x, {}, {mx::greater_equal(mx::arange(0, L, mx::int32), padding)});
  std::vector<double> inputs((K - 1) * C, 0.0);
  for (const double value : doubles(mx::slice(x, {1, 3, 0}, {2, L, C}))) inputs.push_back(value);
  const Row want = loop(inputs, test::floats(weight), none, C, K);
  expect_near(mx::slice(got.output, {1, 3, 0}, {2, L, C}), want.output);
  expect_near(mx::slice(got.state, {1, 0, 0}, {2, K - 1, C}), want.state);
}

TEST(ShortConv, AsALayerAppliesItsActivation) {
  const auto x = test::normal({2, 4, 3}, 7);
  const ShortConv conv{.weight = test::normal({3, 4}, 8), .bias = test::normal({3}, 9)};
  ShortConv with_silu = conv;
  with_silu.activation = ConvActivation::silu;
  const auto plain = doubles(conv(x, {}).output);
  std::vector<double> want;
  for (const double value : plain) want.push_back(value / (1.0 + std::exp(-value)));
  expect_near(with_silu(x, {}).output, want);
  expect_near(with_silu(x, {}).state, doubles(conv(x, {}).state));
}

TEST(ShortConv, RefusesShapesThatDoNotFit) {
  const ShortConv conv{.weight = mx::zeros({3, 4})};
  EXPECT_THROW(conv(mx::zeros({2, 4}), {}), Error);
  EXPECT_THROW(conv(mx::zeros({2, 5, 4}), {}), Error);
  EXPECT_THROW(conv(mx::zeros({2, 5, 3}), mx::zeros({2, 4, 3})), Error);
  EXPECT_THROW(conv(mx::zeros({2, 5, 3}), {}, {NoMask{}, std::vector<int>{1}}), Error);
}

}  // namespace
}  // namespace reprise
