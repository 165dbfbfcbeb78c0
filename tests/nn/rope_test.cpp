#include "reprise/nn/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "mlx/ops.h"
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

float largest_difference(const mx::array& a, const mx::array& b) {
  return mx::max(mx::abs(mx::subtract(a, b))).item<float>();
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

TEST(Rope, E4Llama3DoesNotJumpWhereItsBandsMeet) {
  const auto wavelength = [](double f) { return 2 * std::numbers::pi * f; };
  // Pair 1 lies on the upper boundary, pair 2 on the lower one.
  const RopeScaling scaling{.type = "llama3",
                            .factor = 8.0f,
                            .low_freq_factor = static_cast<float>(1024 / wavelength(100)),
                            .high_freq_factor = static_cast<float>(1024 / wavelength(10)),
                            .original_max_position_embeddings = 1024};
  const auto x = test::normal({1, 1, 3, 8}, 6);
  expect_near(Rope({.dims = 8, .scaling = scaling})(x, 30),
              rotate(test::floats(x), 1, 1, 3, 8, {1, 10, 800, 8000}, false, {30}), 2e-5);
}

// x[…, :dims] · factor.
std::vector<float> scaled(const mx::array& x, int dims, double factor) {
  auto values = test::floats(x);
  const auto D = static_cast<std::size_t>(x.shape(-1));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % D < static_cast<std::size_t>(dims)) values[i] = static_cast<float>(values[i] * factor);
  }
  return values;
}

TEST(Rope, E5LongropeAlwaysTakesTheLongFactorsAndScalesWhatItRotates) {
  const auto x = test::normal({1, 2, 3, 10}, 7);
  auto want = plain(10000, 8);
  const std::vector<float> factors = {1, 1.5, 2, 4};
  for (std::size_t i = 0; i < 4; ++i) want[i] *= factors[i];
  const double magnitude = std::sqrt(1 + std::log(4.0) / std::log(1024.0));
  for (const char* type : {"longrope", "su"}) {
    RopeOptions options{.dims = 8, .max_position_embeddings = 4096};
    options.scaling = RopeScaling{.type = type, .original_max_position_embeddings = 1024, .long_factor = factors};
    for (const int offset : {0, 2000}) {  // before and after the length that it was trained with
      expect_near(Rope(options)(x, offset), rotate(scaled(x, 8, magnitude), 1, 2, 3, 10, want, false, {offset}),
                  offset ? 1e-3 : 2e-5);
    }
    options.max_position_embeddings = 1024;
    expect_near(Rope(options)(x, 5), rotate(test::floats(x), 1, 2, 3, 10, want, false, {5}), 2e-5);
    options.scaling->long_mscale = 2.0f;
    expect_near(Rope(options)(x, 5), rotate(scaled(x, 8, 2.0), 1, 2, 3, 10, want, false, {5}), 4e-5);
    options.scaling->long_factor = {3};
    auto even = plain(10000, 8);
    for (double& f : even) f *= 3;
    expect_near(Rope(options)(x, 5), rotate(scaled(x, 8, 2.0), 1, 2, 3, 10, even, false, {5}), 4e-5);
    options.scaling->long_factor = {1, 2};
    EXPECT_THROW((Rope(options)), Error);
  }
}

TEST(Rope, E6YarnBlendsPairsByTheirNumberOfRotations) {
  const int dims = 32;
  const double factor = 8, original = 2048, pi = std::numbers::pi;
  auto want = plain(10000, dims);
  const auto dim_of = [&](double rotations) {
    return dims * std::log(original / (2 * pi * rotations)) / (2 * std::log(10000.0));
  };
  const double low = std::max(std::floor(dim_of(32)), 0.0), high = std::min(std::ceil(dim_of(1)), dims - 1.0);
  int fast = 0, slow = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    fast += ramp == 0, slow += ramp == 1;
    const double f = want[i], mix = 1 - ramp;
    want[i] = factor * f * f / (factor * f * mix + f * (1 - mix));
  }
  ASSERT_TRUE(fast > 0 && slow > 0 && fast + slow < dims / 2) << "all three bands must be used";
  const auto magnitude = [&](double mscale) { return 0.1 * mscale * std::log(factor) + 1; };
  const auto x = test::normal({1, 2, 3, dims}, 8);
  for (const char* type : {"yarn", "deepseek_yarn", "telechat3-yarn"}) {
    RopeScaling scaling{.type = type, .factor = 8.0f, .original_max_position_embeddings = 2048};
    expect_near(Rope({.dims = dims, .scaling = scaling})(x, 40),
                rotate(scaled(x, dims, magnitude(1)), 1, 2, 3, dims, want, false, {40}), 1e-4);
    scaling.mscale = 0.5f;
    scaling.mscale_all_dim = 2.0f;
    expect_near(Rope({.dims = dims, .scaling = scaling})(x, 40),
                rotate(scaled(x, dims, magnitude(0.5) / magnitude(2)), 1, 2, 3, dims, want, false, {40}), 1e-4);
  }
  EXPECT_THROW(Rope({.dims = dims, .scaling = RopeScaling{.type = "yarn"}}), Error);
}

TEST(Rope, E6TheInverseTakesARotationBackAndItsScaleToo) {
  const auto x = test::normal({2, 2, 3, 20}, 5);
  const std::vector<int> offsets = {4, 9000};
  const mx::array rows(offsets.data(), {2}, mx::int32);
  for (const std::string type : {"default", "yarn", "llama3"}) {
    RopeScaling scaling{.type = type};
    if (type != "default") scaling.factor = 4.0f;
    if (type == "yarn") scaling.mscale = 0.7f;
    const Rope rope({.dims = 16, .scaling = scaling, .max_position_embeddings = 16384});
    const auto back = rope(rope(x, rows, {.scale = 0.5f}), rows, {.scale = 0.5f, .inverse = true});
    const std::vector<float> want = test::floats(x);
    expect_near(back, std::vector<double>(want.begin(), want.end()), 1e-5);
    EXPECT_GT(largest_difference(rope(x, rows), x), 0.1f) << type;
  }
}

TEST(Rope, AnAttentionFactorStandsForTheMagnitudeThatATypeComputes) {
  const auto x = test::normal({1, 2, 3, 8}, 10);
  const mx::array turned = Rope({.dims = 8, .scaling = RopeScaling{.type = "yarn", .factor = 1.0f}})(x, 5);
  RopeScaling yarn{.type = "yarn", .factor = 1.0f, .attention_factor = 3.0f};
  EXPECT_LT(largest_difference(Rope({.dims = 8, .scaling = yarn})(x, 5), mx::multiply(turned, mx::array(3.0f))), 1e-5f);
  RopeScaling longrope{.type = "longrope", .original_max_position_embeddings = 4, .attention_factor = 3.0f};
  longrope.long_factor = {1};
  EXPECT_LT(largest_difference(Rope({.dims = 8, .scaling = longrope, .max_position_embeddings = 64})(x, 5),
                               mx::multiply(turned, mx::array(3.0f))),
            1e-5f);
  yarn.attention_factor = 0.0f;
  EXPECT_THROW(Rope({.dims = 8, .scaling = yarn}), Error);
}

TEST(Rope, E6AnExtraScaleMultipliesPositions) {
  const auto x = test::normal({1, 2, 3, 8}, 6);
  const Rope plain_rope({.dims = 8});
  const Rope linear({.dims = 8, .scaling = RopeScaling{.type = "linear", .factor = 2.0f}});
  EXPECT_LT(largest_difference(plain_rope(x, 5, {.scale = 0.5f}), linear(x, 5)), 1e-6f);
}

TEST(Rope, E6YarnsMagnitudeSquaredScalesTheScores) {
  RopeScaling scaling{.type = "yarn", .factor = 40.0f, .mscale_all_dim = 0.707f};
  const double magnitude = 0.1 * 0.707 * std::log(40.0) + 1;
  EXPECT_NEAR(apply_yarn_mscale(0.125f, scaling), 0.125 * magnitude * magnitude, 1e-6);
  scaling.factor = 1.0f;
  EXPECT_EQ(apply_yarn_mscale(0.125f, scaling), 0.125f);
  scaling.factor = 40.0f;
  scaling.mscale_all_dim = 0.0f;
  EXPECT_EQ(apply_yarn_mscale(0.125f, scaling), 0.125f);
  scaling.mscale_all_dim = 0.707f;
  scaling.type = "default";
  EXPECT_EQ(apply_yarn_mscale(0.125f, scaling), 0.125f);
}

TEST(Rope, E7ProportionalLeavesTheLastPairsAsTheyAre) {
  const auto x = test::normal({1, 2, 3, 16}, 9);
  auto want = plain(10000, 16);
  for (std::size_t i = 0; i < want.size(); ++i) {
    want[i] = i < 4 ? 2 * want[i] : std::numeric_limits<double>::infinity();
  }
  const RopeScaling scaling{.type = "proportional", .factor = 2.0f, .partial_rotary_factor = 0.5f};
  expect_near(Rope({.dims = 16, .scaling = scaling})(x, 21), rotate(test::floats(x), 1, 2, 3, 16, want, false, {21}),
              2e-5);
  EXPECT_THROW(Rope({.dims = 16, .scaling = RopeScaling{.type = "proportional", .partial_rotary_factor = 1.5f}}),
               Error);
}

TEST(Rope, E8DynamicGrowsTheBaseWithTheLengthOfEachRow) {
  const auto x = test::normal({1, 2, 3, 8}, 10);
  const RopeOptions options{
      .dims = 8, .scaling = RopeScaling{.type = "dynamic", .factor = 2.0f}, .max_position_embeddings = 16};
  for (const int offset : {0, 13, 14, 40}) {
    const double n = std::max(3 + offset, 16);
    const double base = 10000 * std::pow(2 * n / 16 - 1, 8.0 / 6);
    expect_near(Rope(options)(x, offset), rotate(test::floats(x), 1, 2, 3, 8, plain(base, 8), false, {offset}), 2e-5);
  }
  EXPECT_THROW(Rope({.dims = 8, .scaling = RopeScaling{.type = "dynamic", .factor = 2.0f}}), Error);
}

TEST(Rope, E2ARowOfABatchIsRotatedAsItWouldBeAlone) {
  const std::vector<RopeScaling> variants = {
      {},
      {.type = "linear", .factor = 4.0f},
      {.type = "llama3", .factor = 8.0f, .original_max_position_embeddings = 64},
      {.type = "yarn", .factor = 4.0f},
      {.type = "longrope", .original_max_position_embeddings = 8, .long_factor = {1, 2, 3, 4}},
      {.type = "proportional", .partial_rotary_factor = 0.5f},
      {.type = "mrope", .mrope_section = {1, 1, 2}},
      {.type = "dynamic", .factor = 2.0f},
      {.type = "freq_factors", .freq_factors = {1, 2, 4, 8}}};
  const auto x = test::normal({3, 2, 4, 10}, 11);
  const std::vector<int> offsets = {0, 29, 7};  // one row is past max_position_embeddings
  for (const RopeScaling& scaling : variants) {
    SCOPED_TRACE(scaling.type);
    const Rope rope({.dims = 8, .scaling = scaling, .max_position_embeddings = 16});
    const auto batch = rope(x, mx::array(offsets.data(), {3}, mx::int32));
    for (int b = 0; b < 3; ++b) {
      const auto row = [&](const mx::array& all) { return mx::slice(all, {b, 0, 0, 0}, {b + 1, 2, 4, 10}); };
      const int offset = offsets[static_cast<std::size_t>(b)];
      EXPECT_TRUE(mx::allclose(row(batch), rope(row(x), offset), 1e-5, 1e-5).item<bool>()) << b;
      EXPECT_FALSE(mx::allclose(row(batch), rope(row(x), offset + 1), 1e-2, 1e-2).item<bool>()) << b;
    }
  }
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
