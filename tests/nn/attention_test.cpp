#include "reprise/nn/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

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
