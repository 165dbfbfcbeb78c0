#include "reprise/nn/mlp.h"

#include <gtest/gtest.h>

#include <cmath>

#include "mlx/ops.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

TEST(Gelu, EqualsItsDefinitionInFloat64) {
  const auto x = mx::arange(-6.0, 6.0, 0.25, mx::float32);
  const auto values = test::floats(x);
  const auto exact = test::floats(gelu(x));
  const auto by_tanh = test::floats(gelu_tanh(x));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double v = values[i];
    EXPECT_NEAR(exact[i], v * 0.5 * std::erfc(-v / std::sqrt(2.0)), 1e-6) << v;
    EXPECT_NEAR(by_tanh[i], 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))), 1e-6) << v;
  }
}

TEST(Gelu, KeepsItsInputsDtype) {
  EXPECT_EQ(gelu(mx::ones({2}, mx::bfloat16)).dtype(), mx::bfloat16);
  EXPECT_EQ(gelu_tanh(mx::ones({2}, mx::bfloat16)).dtype(), mx::bfloat16);
}

}  // namespace
}  // namespace reprise
