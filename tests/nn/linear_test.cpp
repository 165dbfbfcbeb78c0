#include "reprise/nn/linear.h"

#include <gtest/gtest.h>

#include "reprise/nn/mlp.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

QuantizedWeight quantized(const mx::array& w, int group_size, int bits, mx::Dtype dtype) {
  auto parts = mx::quantize(mx::astype(w, dtype), group_size, bits);
  mx::eval(parts);
  return {parts[0], parts[1], parts[2], group_size, bits};
}

float largest_difference(const mx::array& a, const mx::array& b) {
  return test::floats(mx::max(mx::abs(mx::subtract(a, b))))[0];
}

// max|a - b| / max|b|: products round their input.
float relative_error(const mx::array& a, const mx::array& b) {
  return largest_difference(a, b) / test::floats(mx::max(mx::abs(b)))[0];
}

TEST(Linear, QuantisedEqualsItsDequantisedWeight) {
  // Few rows and many take different kernels.
  const auto few = test::normal({2, 3, 128}, 1);
  const auto many = test::normal({2, 30, 128}, 4);
  const auto bias = test::normal({16}, 3);
  for (int bits : {2, 3, 4, 5, 6, 8}) {
    for (int group_size : {32, 64, 128}) {
      const auto w = quantized(test::normal({16, 128}, 2), group_size, bits, mx::float16);
      const auto dense = mx::dequantize(w.packed, mx::astype(w.scales, mx::float32), mx::astype(w.biases, mx::float32),
                                        group_size, bits);
      for (const auto& x : {few, many}) {
        const auto got = Linear(w, bias)(x);
        EXPECT_EQ(got.dtype(), mx::float32) << "activations keep their dtype whatever the scales'";
        EXPECT_LT(relative_error(got, Linear(dense, bias)(x)), 1e-4f) << bits << " bits, groups of " << group_size;
      }
    }
  }
}

TEST(Embedding, QuantisedRowsAndHeadEqualTheDequantisedTable) {
  const auto w = quantized(test::normal({10, 64}, 5), 32, 4, mx::float16);
  const auto table =
      mx::dequantize(w.packed, mx::astype(w.scales, mx::float32), mx::astype(w.biases, mx::float32), 32, 4);
  const Embedding embedding(w, mx::float32);
  const mx::array ids({9, 0, 3}, {1, 3}, mx::int32);
  EXPECT_LT(largest_difference(embedding(ids), mx::take(table, ids, 0)), 1e-6f);
  const auto x = test::normal({1, 2, 64}, 6);
  EXPECT_LT(relative_error(embedding.as_linear(x), mx::matmul(x, mx::transpose(table))), 1e-4f);
}

TEST(Mlp, SwigluIsSiluOfGateTimesUp) {
  const auto got = test::floats(swiglu(mx::array({0.0f, 2.0f, -1.0f}), mx::array({5.0f, 3.0f, 4.0f})));
  EXPECT_NEAR(got[0], 0.0f, 1e-6f);
  EXPECT_NEAR(got[1], 2.0f / (1.0f + std::exp(-2.0f)) * 3.0f, 1e-5f);
  EXPECT_NEAR(got[2], -1.0f / (1.0f + std::exp(1.0f)) * 4.0f, 1e-5f);
}

TEST(Mlp, WhatIsOneOperationEqualsItsParts) {
  const Linear q(test::normal({48, 64}, 1), test::normal({48}, 2));
  const Linear k(test::normal({16, 64}, 3));
  const GatedMlp mlp{Linear(test::normal({96, 64}, 4)), Linear(test::normal({96, 64}, 5)),
                     Linear(test::normal({64, 96}, 6))};
  const RmsNorm norm(test::normal({64}, 7), 1e-5f);
  for (const int rows : {1, 20}) {
    const auto x = test::normal({1, rows, 64}, 8);
    const auto residual = test::normal({1, rows, 48}, 9);
    const auto projected = project(x, norm, {q, k});
    ASSERT_EQ(projected.size(), 2u);
    EXPECT_LT(relative_error(projected[0], q(norm(x))), 1e-5f);
    EXPECT_LT(relative_error(projected[1], k(norm(x))), 1e-5f);
    EXPECT_LT(relative_error(q.add_to(residual, x), mx::add(residual, q(x))), 1e-5f);
    const auto parts = mlp.down_proj(swiglu(mlp.gate_proj(norm(x)), mlp.up_proj(norm(x))));
    EXPECT_LT(relative_error(mlp(norm(x)), parts), 1e-5f);
    EXPECT_LT(relative_error(mlp.add_to(x, norm, x), mx::add(x, parts)), 1e-5f);
  }
}

}  // namespace
}  // namespace reprise
