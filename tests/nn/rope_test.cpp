#include "reprise/nn/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "reprise/base/error.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

// Angles by the definition, in float64. denominators: [dims / 2].
std::vector<double> rotate(const std::vector<float>& x, int B, int H, int L, int D,
                           const std::vector<double>& denominators, bool traditional, const std::vector<int>& offsets) {
  std::vector<double> out(x.begin(), x.end());
  const int half = static_cast<int>(denominators.size());
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H; ++h) {
      for (int t = 0; t < L; ++t) {
        const auto row = static_cast<std::size_t>(((b * H + h) * L + t) * D);
        for (int i = 0; i < half; ++i) {
          const double angle = (offsets[static_cast<std::size_t>(b)] + t) / denominators[static_cast<std::size_t>(i)];
          const auto first = row + static_cast<std::size_t>(traditional ? 2 * i : i);
          const auto second = row + static_cast<std::size_t>(traditional ? 2 * i + 1 : i + half);
          out[first] = x[first] * std::cos(angle) - x[second] * std::sin(angle);
          out[second] = x[first] * std::sin(angle) + x[second] * std::cos(angle);
        }
      }
    }
  }
  return out;
}

std::vector<double> plain(double base, int dims) {
  std::vector<double> f;
  for (int i = 0; i < dims / 2; ++i) f.push_back(std::pow(base, 2.0 * i / dims));
  return f;
}

void expect_near(const mx::array& got, const std::vector<double>& want, double tolerance) {
  const auto values = test::floats(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], tolerance) << "at " << i;
}

TEST(Rope, E1EqualsFloat64ForScalarAndPerRowOffsets) {
  const auto x = test::normal({2, 3, 4, 20}, 1);
  for (bool traditional : {false, true}) {
    const Rope rope({.dims = 16, .base = 10000.0f, .traditional = traditional});
    expect_near(rope(x, 7), rotate(test::floats(x), 2, 3, 4, 20, plain(10000, 16), traditional, {7, 7}), 2e-5);
    const std::vector<int> offsets = {3, 11};
    expect_near(rope(x, mx::array(offsets.data(), {2}, mx::int32)),
                rotate(test::floats(x), 2, 3, 4, 20, plain(10000, 16), traditional, offsets), 2e-5);
  }
}

TEST(Rope, E3LinearDividesPositions) {
  const auto x = test::normal({1, 2, 3, 8}, 2);
  const Rope rope({.dims = 8, .scaling = RopeScaling{.type = "linear", .factor = 4.0f}});
  auto slower = plain(10000, 8);
  for (double& f : slower) f *= 4;
  expect_near(rope(x, 5), rotate(test::floats(x), 1, 2, 3, 8, slower, false, {5}), 2e-5);
}

TEST(Rope, E4Llama3KeepsStretchesAndBlendsByWavelength) {
  const int dims = 64;
  const RopeScaling scaling{.type = "llama3", .factor = 8.0f, .original_max_position_embeddings = 1024};
  const Rope rope({.dims = dims, .base = 500000.0f, .scaling = scaling});
  auto want = plain(500000, dims);
  int kept = 0, stretched = 0, blended = 0;
  for (double& f : want) {
    const double wavelength = 2 * std::numbers::pi * f;
    if (wavelength > 1024.0) {
      f *= 8, ++stretched;
    } else if (wavelength > 256.0) {
      const double s = (1024.0 / wavelength - 1) / 3;
      f /= (1 - s) / 8 + s, ++blended;
    } else {
      ++kept;
    }
  }
  ASSERT_TRUE(kept > 0 && stretched > 0 && blended > 0) << "all three bands must be used";
  const auto x = test::normal({1, 1, 6, dims}, 3);
  expect_near(rope(x, 40), rotate(test::floats(x), 1, 1, 6, dims, want, false, {40}), 1e-4);
}

TEST(Rope, FreqFactorsMultiplyTheDenominators) {
  auto want = plain(10000, 8);
  const std::vector<float> factors = {1, 2, 4, 8};
  for (std::size_t i = 0; i < 4; ++i) want[i] *= factors[i];
  const Rope rope({.dims = 8, .scaling = RopeScaling{.type = "freq_factors", .freq_factors = factors}});
  const auto x = test::normal({1, 1, 2, 8}, 4);
  expect_near(rope(x, 9), rotate(test::floats(x), 1, 1, 2, 8, want, false, {9}), 2e-5);
}

TEST(Rope, UnknownTypeIsNamedAndMissingKeysAreToldApart) {
  try {
    Rope({.dims = 8, .scaling = RopeScaling{.type = "spiral"}});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("spiral"), std::string::npos);
  }
  EXPECT_THROW(Rope({.dims = 8, .scaling = RopeScaling{.type = "linear"}}), Error);
  EXPECT_THROW(Rope({.dims = 7}), Error);
  EXPECT_THROW(Rope({.dims = 8, .scaling = RopeScaling{.type = "linear", .factor = 0.0f}}), Error);
  EXPECT_THROW(
      Rope({.dims = 8,
            .scaling = RopeScaling{.type = "llama3", .factor = 8.0f, .original_max_position_embeddings = -8192}}),
      Error);
  const Rope rope({.dims = 8});
  EXPECT_THROW(rope(mx::zeros({1, 1, 2, 6}), 0), Error);
  EXPECT_THROW(rope(mx::zeros({2, 8}), 0), Error);
  EXPECT_THROW(rope(mx::zeros({2, 1, 2, 8}), mx::zeros({3}, mx::int32)), Error);
  EXPECT_THROW(Rope({.dims = 8, .scaling = RopeScaling{.type = "freq_factors", .freq_factors = {1, 2}}}), Error);
}

TEST(Rope, InputStaysAsItIs) {
  const auto x = test::normal({1, 1, 2, 8}, 5);
  const auto before = test::floats(x);
  const Rope rope({.dims = 8, .scaling = RopeScaling{.type = "yarn", .factor = 4.0f}});
  mx::eval(rope(x, 3));
  EXPECT_EQ(test::floats(x), before);
}

}  // namespace
}  // namespace reprise
