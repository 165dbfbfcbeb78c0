// The gated delta net's recurrence against float64 loops, and padded batches against rows alone.
#include "reprise/nn/gated_delta.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "reprise/base/error.h"
#include "tests/kernels/recurrence_for_tests.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr int kHk = 2, kHv = 4, kDk = 8, kDv = 12, kWidth = 4;
constexpr int kChannels = 2 * kHk * kDk + kHv * kDv;

GatedDeltaParams params() {
  mx::array decay = mx::exp(test::random_array({kHv}, 21));
  mx::eval(decay);
  return {.conv = {.weight = test::random_array({kChannels, kWidth}, 20, 0.5f), .activation = ConvActivation::silu},
          .rule = {.key_heads = kHk,
                   .value_heads = kHv,
                   .key_dim = kDk,
                   .value_dim = kDv,
                   .decay = decay,
                   .dt_bias = test::random_array({kHv}, 22)}};
}

GatedDeltaInputs inputs(int B, int L) {
  return {.qkv = test::random_array({B, L, kChannels}, 1),
          .a = test::random_array({B, L, kHv}, 2),
          .b = test::random_array({B, L, kHv}, 3)};
}

mx::array cut(const mx::array& x, int row, int first, int last) {
  return mx::slice(x, {row, first, 0}, {row + 1, last, x.shape(2)});
}

// Columns first … last - 1 of one row.
GatedDeltaInputs cut(const GatedDeltaInputs& x, int row, int first, int last) {
  return {cut(x.qkv, row, first, last), cut(x.a, row, first, last), cut(x.b, row, first, last)};
}

// `before` and `after` columns of filler, which must not matter, around.
GatedDeltaInputs padded(const GatedDeltaInputs& x, int before, int after) {
  const auto pad = [&](const mx::array& array) {
    return mx::pad(array, std::vector<std::pair<int, int>>{{0, 0}, {before, after}, {0, 0}}, mx::array(3.0f));
  };
  return {pad(x.qkv), pad(x.a), pad(x.b)};
}

GatedDeltaInputs stacked(const std::vector<GatedDeltaInputs>& rows) {
  std::vector<mx::array> qkv, a, b;
  for (const auto& row : rows) {
    qkv.push_back(row.qkv);
    a.push_back(row.a);
    b.push_back(row.b);
  }
  return {mx::concatenate(qkv, 0), mx::concatenate(a, 0), mx::concatenate(b, 0)};
}

void expect_near(const mx::array& got, const mx::array& want, double tolerance = 1e-5) {
  ASSERT_EQ(got.shape(), want.shape());
  EXPECT_LE(mx::max(mx::abs(mx::subtract(got, want))).item<float>(), tolerance);
}

TEST(GatedDelta, IsTheRuleOverTheConvolution) {
  const int B = 2, L = 9;
  const auto p = params();
  const auto x = inputs(B, L);
  const auto qkv = test::doubles(x.qkv);
  const auto weight = test::doubles(p.conv.weight);
  std::vector<float> convolved;
  for (int row = 0; row < B; ++row) {
    for (int t = 0; t < L; ++t) {
      for (int c = 0; c < kChannels; ++c) {
        double sum = 0.0;
        for (int k = 0; k < kWidth; ++k) {
          const int at = t - kWidth + 1 + k;
          if (at < 0) continue;
          sum += weight[static_cast<std::size_t>(c * kWidth + k)] *
                 qkv[static_cast<std::size_t>((row * L + at) * kChannels + c)];
        }
        convolved.push_back(static_cast<float>(sum * test::sigmoid(sum)));
      }
    }
  }
  const auto want =
      test::delta_rule_loop({mx::array(convolved.begin(), {B, L, kChannels}, mx::float32), x.a, x.b}, p.rule, {});
  const auto got = gated_delta(x, p, {}, {});
  const auto output = test::doubles(got.output);
  ASSERT_EQ(output.size(), want.output.size());
  for (std::size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], want.output[i], 1e-5);
  const auto state = test::doubles(*got.state.rule);
  for (std::size_t i = 0; i < state.size(); ++i) ASSERT_NEAR(state[i], want.state[i], 1e-5);
}

TEST(GatedDelta, LeftPaddedRowsAreThoseAloneAlsoInPieces) {
  const std::vector<int> lengths = {7, 3, 10};
  const auto p = params();
  const auto x = inputs(3, 10);
  std::vector<GatedDeltaInputs> rows;
  std::vector<std::vector<bool>> real;
  for (int row = 0; row < 3; ++row) {
    const int length = lengths[static_cast<std::size_t>(row)];
    rows.push_back(padded(cut(x, row, 0, length), 10 - length, 0));
    real.emplace_back(10, true);
    std::fill_n(real.back().begin(), 10 - length, false);
  }
  const auto batch = stacked(rows);
  const auto mask = test::bool_array(real);
  for (const int piece : {10, 4, 1}) {
    SCOPED_TRACE("pieces of " + std::to_string(piece));
    GatedDeltaState state;
    std::vector<mx::array> outputs;
    for (int at = 0; at < 10; at += piece) {
      const int end = std::min(10, at + piece);
      const auto columns = [&](const mx::array& a) { return mx::slice(a, {0, at, 0}, {3, end, a.shape(2)}); };
      const auto result = gated_delta({columns(batch.qkv), columns(batch.a), columns(batch.b)}, p, state,
                                      {.mask = mx::slice(mask, {0, at}, {3, end})});
      outputs.push_back(result.output);
      state = result.state;
    }
    const auto output = mx::concatenate(outputs, 1);
    for (int row = 0; row < 3; ++row) {
      const int length = lengths[static_cast<std::size_t>(row)];
      const auto alone = gated_delta(cut(x, row, 0, length), p, {}, {});
      expect_near(mx::slice(output, {row, 10 - length, 0, 0}, {row + 1, 10, kHv, kDv}), alone.output);
      expect_near(mx::slice(*state.rule, {row, 0, 0, 0}, {row + 1, kHv, kDv, kDk}), *alone.state.rule);
      expect_near(mx::slice(*state.conv, {row, 0, 0}, {row + 1, kWidth - 1, kChannels}), *alone.state.conv);
    }
  }
}

TEST(GatedDelta, RightPaddedRowsAreThoseAlone) {
  const std::vector<int> lengths = {7, 1, 10};
  const auto p = params();
  const auto x = inputs(3, 10);
  std::vector<GatedDeltaInputs> rows;
  std::vector<std::vector<bool>> real;
  for (int row = 0; row < 3; ++row) {
    const int length = lengths[static_cast<std::size_t>(row)];
    rows.push_back(padded(cut(x, row, 0, length), 0, 10 - length));
    real.emplace_back(10, false);
    std::fill_n(real.back().begin(), length, true);
  }
  const auto got = gated_delta(stacked(rows), p, {}, {.mask = test::bool_array(real), .lengths = lengths});
  for (int row = 0; row < 3; ++row) {
    const int length = lengths[static_cast<std::size_t>(row)];
    const auto alone = gated_delta(cut(x, row, 0, length), p, {}, {});
    expect_near(mx::slice(got.output, {row, 0, 0, 0}, {row + 1, length, kHv, kDv}), alone.output);
    expect_near(mx::slice(*got.state.rule, {row, 0, 0, 0}, {row + 1, kHv, kDv, kDk}), *alone.state.rule);
    expect_near(mx::slice(*got.state.conv, {row, 0, 0}, {row + 1, kWidth - 1, kChannels}), *alone.state.conv);
  }
}

// A state is updated in place only where nobody else holds it.
TEST(GatedDelta, AStateThatIsHeldStaysWhatItWas) {
  const auto p = params();
  const auto x = inputs(1, 6);
  const auto first = gated_delta(cut(x, 0, 0, 3), p, {}, {});
  mx::eval({*first.state.rule, *first.state.conv});
  const auto before = test::doubles(*first.state.rule);
  for (int i = 0; i < 2; ++i) {
    const auto next = gated_delta(cut(x, 0, 3, 6), p, first.state, {});
    expect_near(next.output, mx::slice(gated_delta(x, p, {}, {}).output, {0, 3, 0, 0}, {1, 6, kHv, kDv}));
    EXPECT_EQ(test::doubles(*first.state.rule), before);
  }
}

TEST(GatedDelta, InputsThatDoNotFitAreRefused) {
  const auto x = inputs(2, 3);
  EXPECT_THROW(gated_delta({x.qkv, mx::zeros({2, 3, 1}), x.b}, params(), {}, {}), Error);
  EXPECT_THROW(gated_delta(x, params(), {.conv = {}, .rule = mx::zeros({1, kHv, kDv, kDk})}, {}), Error);
}

}  // namespace
}  // namespace reprise
