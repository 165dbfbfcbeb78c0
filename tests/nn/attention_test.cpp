#include "reprise/nn/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "reprise/base/error.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr int B = 2, H = 4, Hkv = 2, L = 3, S = 5, D = 8, Dv = 6;
constexpr float kScale = 0.35f;

// By the definition, in float64; `sees(query, key)` is the mask.
std::vector<double> reference(const mx::array& q, const mx::array& k, const mx::array& v,
                              const std::function<bool(int, int)>& sees) {
  const auto Q = test::floats(q), K = test::floats(k), V = test::floats(v);
  std::vector<double> out(static_cast<std::size_t>(B * H * L * Dv), 0.0);
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H; ++h) {
      const int g = h / (H / Hkv);
      for (int i = 0; i < L; ++i) {
        std::vector<double> weight(S, 0.0);
        double total = 0;
        for (int j = 0; j < S; ++j) {
          double dot = 0;
          for (int d = 0; d < D; ++d) {
            dot += double{Q[static_cast<std::size_t>(((b * H + h) * L + i) * D + d)]} *
                   K[static_cast<std::size_t>(((b * Hkv + g) * S + j) * D + d)];
          }
          weight[static_cast<std::size_t>(j)] = sees(i, j) ? std::exp(dot * kScale) : 0.0;
          total += weight[static_cast<std::size_t>(j)];
        }
        for (int j = 0; j < S; ++j) {
          for (int d = 0; d < Dv; ++d) {
            out[static_cast<std::size_t>(((b * H + h) * L + i) * Dv + d)] +=
                weight[static_cast<std::size_t>(j)] / total *
                V[static_cast<std::size_t>(((b * Hkv + g) * S + j) * Dv + d)];
          }
        }
      }
    }
  }
  return out;
}

void expect_near(const mx::array& got, const std::vector<double>& want, double tolerance = 1e-5) {
  const auto values = test::floats(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], tolerance) << "at " << i;
}

struct AttentionTest : testing::Test {
  mx::array q = test::normal({B, H, L, D}, 1);
  mx::array k = test::normal({B, Hkv, S, D}, 2);
  mx::array v = test::normal({B, Hkv, S, Dv}, 3);
};

TEST_F(AttentionTest, GroupedHeadsWithoutMaskEqualTheDefinition) {
  const auto out = scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale});
  EXPECT_EQ(out.shape(), (mx::Shape{B, H, L, Dv}));
  expect_near(out, reference(q, k, v, [](int, int) { return true; }));
}

TEST_F(AttentionTest, CausalIsAlignedBottomRight) {
  const auto want = reference(q, k, v, [](int i, int j) { return j <= S - L + i; });
  expect_near(scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale, .mask = Causal{}}), want);
}

TEST_F(AttentionTest, BoolAndAdditiveMasksAgree) {
  const auto sees = [](int i, int j) { return (i + j) % 3 != 0; };
  std::vector<float> additive;
  for (int i = 0; i < L; ++i) {
    for (int j = 0; j < S; ++j) additive.push_back(sees(i, j) ? 0.0f : -1e30f);
  }
  const mx::array add(additive.begin(), {L, S}, mx::float32);
  const auto allowed = mx::equal(add, mx::array(0.0f));
  const auto want = reference(q, k, v, sees);
  expect_near(scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale, .mask = add}), want);
  expect_near(scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale, .mask = allowed}), want);
}

TEST_F(AttentionTest, FullyMaskedRowIsFinite) {
  const auto out =
      scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale, .mask = mx::zeros({L, S}, mx::bool_)});
  for (float x : test::floats(out)) EXPECT_TRUE(std::isfinite(x));
}

TEST_F(AttentionTest, FullyMaskedRowOfABatchMaskIsFiniteInEveryForm) {
  const mx::array infinite = mx::full({B, 1, L, S}, -std::numeric_limits<float>::infinity());
  for (const mx::array& mask : {mx::zeros({B, 1, L, S}, mx::bool_), infinite}) {
    for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      const auto out = scaled_dot_product_attention(
          mx::astype(q, dtype), DenseKV{mx::astype(k, dtype), mx::astype(v, dtype)}, {.scale = kScale, .mask = mask});
      EXPECT_EQ(out.dtype(), dtype);
      for (float x : test::floats(out)) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

TEST_F(AttentionTest, MaskOfABatchHidesEachRowsOwnColumns) {
  const std::vector<int> padding = {0, 2};
  const auto columns = mx::reshape(mx::arange(0, S), {1, 1, 1, S});
  const auto mask = mx::broadcast_to(
      mx::greater_equal(columns, mx::reshape(mx::array(padding.begin(), {B}, mx::int32), {B, 1, 1, 1})), {B, 1, L, S});
  const auto out = scaled_dot_product_attention(q, DenseKV{k, v}, {.scale = kScale, .mask = mask});
  const std::size_t row = static_cast<std::size_t>(H * L * Dv);
  const auto got = test::floats(out);
  for (std::size_t b = 0; b < 2; ++b) {
    const auto want = reference(q, k, v, [&](int, int j) { return j >= padding[b]; });
    for (std::size_t i = b * row; i < (b + 1) * row; ++i) ASSERT_NEAR(got[i], want[i], 1e-5);
  }
}

TEST_F(AttentionTest, OneDimensionalMaskHidesKeysFromOneToken) {
  const std::vector<bool> sees = {true, false, true, false, true};
  const auto out = scaled_dot_product_attention(q, DenseKV{k, v},
                                                {.scale = kScale, .mask = mx::array(sees.begin(), {S}, mx::bool_)});
  expect_near(out, reference(q, k, v, [&](int, int j) { return j % 2 == 0; }));
  const auto one = mx::slice(q, {0, 0, L - 1, 0}, {B, H, L, D});
  EXPECT_TRUE(mx::allclose(scaled_dot_product_attention(
                               one, DenseKV{k, v}, {.scale = kScale, .mask = mx::array(sees.begin(), {S}, mx::bool_)}),
                           mx::slice(out, {0, 0, L - 1, 0}, {B, H, L, Dv}), 1e-5, 1e-5)
                  .item<bool>());
}

TEST_F(AttentionTest, SinksActLikeAKeyWithoutValue) {
  // The key that makes the score is one more column of scores; its value is zero.
  const std::vector<float> logits = {-3.0f, 0.0f, 1.0f, 4.0f};
  const auto out = scaled_dot_product_attention(
      q, DenseKV{k, v}, {.scale = kScale, .sinks = mx::array(logits.begin(), {H}, mx::float32)});
  const auto more = [](const mx::array& x) { return mx::pad(x, {{0, 0}, {0, 0}, {0, 1}, {0, 0}}); };
  std::vector<float> added;
  for (int h = 0; h < H; ++h) {
    for (int j = 0; j <= S; ++j) added.push_back(j == S ? logits[static_cast<std::size_t>(h)] : 0.0f);
  }
  const auto want = scaled_dot_product_attention(
      q, DenseKV{more(k), more(v)}, {.scale = kScale, .mask = mx::array(added.begin(), {H, 1, S + 1}, mx::float32)});
  EXPECT_TRUE(mx::allclose(out, want, 1e-5, 1e-5).item<bool>());
}

TEST_F(AttentionTest, NothingInGivesNothingOut) {
  const auto out = scaled_dot_product_attention(mx::zeros({0, H, L, D}),
                                                DenseKV{mx::zeros({0, Hkv, S, D}), mx::zeros({0, Hkv, S, Dv})}, {});
  EXPECT_EQ(out.shape(), (mx::Shape{0, H, L, Dv}));
  EXPECT_EQ(scaled_dot_product_attention(mx::zeros({B, H, 0, D}), DenseKV{k, v}, {.mask = Causal{}}).shape(),
            (mx::Shape{B, H, 0, Dv}));
}

TEST_F(AttentionTest, NarrowStoredRowsKeepTheQueriesDtype) {
  const auto out = scaled_dot_product_attention(q, DenseKV{mx::astype(k, mx::float16), mx::astype(v, mx::float16)},
                                                {.scale = kScale});
  EXPECT_EQ(out.dtype(), mx::float32);
  expect_near(out, reference(q, k, v, [](int, int) { return true; }), 5e-3);
}

TEST_F(AttentionTest, ShapesThatDoNotFitAreRefused) {
  const auto bad = test::normal({B, 3, S, D}, 4);
  EXPECT_THROW(scaled_dot_product_attention(q, DenseKV{bad, v}, {}), Error);
  EXPECT_THROW(scaled_dot_product_attention(q, DenseKV{k, v}, {.mask = mx::zeros({L, S + 2}, mx::bool_)}), Error);
  EXPECT_THROW(scaled_dot_product_attention(q, DenseKV{k, v}, {.sinks = mx::zeros({H + 1})}), Error);
}

}  // namespace
}  // namespace reprise
