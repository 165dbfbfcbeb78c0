// RG-LRU with its block-diagonal gates against a float64 loop, and padded batches against rows alone.
#include "reprise/nn/rg_lru.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "reprise/base/error.h"
#include "tests/kernels/recurrence_for_tests.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr int kHeads = 3, kSize = 5, kD = kHeads * kSize;

RgLruParams params() {
  mx::array decay = mx::exp(test::random_array({kD}, 25));
  mx::eval(decay);
  return {.input_gate_weight = test::random_array({kHeads, kSize, kSize}, 21),
          .input_gate_bias = test::random_array({kHeads, kSize}, 22),
          .recurrent_gate_weight = test::random_array({kHeads, kSize, kSize}, 23),
          .recurrent_gate_bias = test::random_array({kHeads, kSize}, 24),
          .decay = decay};
}

// x [B, L, D] through each block's matrix, in float64.
mx::array gate_of(const mx::array& x, const mx::array& weight, const mx::array& bias) {
  const auto in = test::doubles(x), w = test::doubles(weight), b = test::doubles(bias);
  std::vector<float> out;
  for (std::size_t row = 0; row < in.size() / kD; ++row) {
    for (std::size_t i = 0; i < kD; ++i) {
      const std::size_t block = i / kSize;
      double sum = b[i];
      for (std::size_t j = 0; j < kSize; ++j) {
        sum += in[row * kD + block * kSize + j] * w[(block * kSize + j) * kSize + i % kSize];
      }
      out.push_back(static_cast<float>(sum));
    }
  }
  return mx::array(out.begin(), x.shape(), mx::float32);
}

void expect_near(const mx::array& got, const mx::array& want) {
  ASSERT_EQ(got.shape(), want.shape());
  EXPECT_LE(mx::max(mx::abs(mx::subtract(got, want))).item<float>(), 1e-5f);
}

mx::array cut(const mx::array& x, int row, int first, int last) {
  return mx::slice(x, {row, first, 0}, {row + 1, last, kD});
}

TEST(RgLruBlock, EqualsAFloat64Loop) {
  const auto p = params();
  const auto x = test::random_array({2, 11, kD}, 1);
  const auto got = rg_lru(x, p, {});
  const auto want = test::rg_lru_loop({.x = x,
                                       .input_gate = gate_of(x, p.input_gate_weight, p.input_gate_bias),
                                       .recurrent_gate = gate_of(x, p.recurrent_gate_weight, p.recurrent_gate_bias),
                                       .decay = p.decay},
                                      {});
  const auto output = test::doubles(got.output);
  ASSERT_EQ(output.size(), want.output.size());
  for (std::size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], want.output[i], 1e-5);
}

TEST(RgLruBlock, PaddedRowsAreThoseAloneAlsoInPieces) {
  const std::vector<int> lengths = {7, 3, 10};
  const auto p = params();
  const auto x = test::random_array({3, 10, kD}, 1);
  for (const bool left : {true, false}) {
    std::vector<mx::array> rows;
    std::vector<std::vector<bool>> real;
    for (int row = 0; row < 3; ++row) {
      const int length = lengths[static_cast<std::size_t>(row)];
      const int before = left ? 10 - length : 0;
      rows.push_back(mx::pad(cut(x, row, 0, length),
                             std::vector<std::pair<int, int>>{{0, 0}, {before, 10 - length - before}, {0, 0}},
                             mx::array(3.0f)));
      real.emplace_back(10, false);
      std::fill_n(real.back().begin() + before, length, true);
    }
    const auto batch = mx::concatenate(rows, 0);
    const auto mask = test::bool_array(real);
    for (const int piece : {10, 4, 1}) {
      SCOPED_TRACE((left ? "left, pieces of " : "right, pieces of ") + std::to_string(piece));
      std::optional<mx::array> state;
      std::vector<mx::array> outputs;
      for (int at = 0; at < 10; at += piece) {
        const int end = std::min(10, at + piece);
        const auto result =
            rg_lru(mx::slice(batch, {0, at, 0}, {3, end, kD}), p, state, {.mask = mx::slice(mask, {0, at}, {3, end})});
        outputs.push_back(result.output);
        state = result.state;
      }
      const auto output = mx::concatenate(outputs, 1);
      for (int row = 0; row < 3; ++row) {
        const int length = lengths[static_cast<std::size_t>(row)];
        const int before = left ? 10 - length : 0;
        const auto alone = rg_lru(cut(x, row, 0, length), p, {});
        expect_near(cut(output, row, before, before + length), alone.output);
        expect_near(mx::slice(*state, {row, 0}, {row + 1, kD}), alone.state);
      }
    }
  }
}

TEST(RgLruBlock, GatesThatDoNotFitAreRefused) {
  auto p = params();
  EXPECT_THROW(rg_lru(mx::zeros({1, 2, kD + 1}), p, {}), Error);
  p.recurrent_gate_weight = mx::zeros({kHeads, kSize, kSize + 1});
  EXPECT_THROW(rg_lru(mx::zeros({1, 2, kD}), p, {}), Error);
}

}  // namespace
}  // namespace reprise
