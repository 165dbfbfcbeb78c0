// Rotation by pointers against MLX's, for every kind of rope that has fixed frequencies.
#include "reprise/kernels/rope_cpu.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "tests/kernels/each_target.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

struct Kind {
  int dims = 32;
  bool traditional = false;
  float scale = 1.0f;
  std::optional<float> base = {};  // none: `periods`
  std::vector<float> periods = {};
};

std::vector<float> frequencies_of(const Kind& kind) {
  const int half = kind.dims / 2;
  mx::array turns = kind.base
                        ? mx::exp(mx::multiply(mx::arange(0.0, -static_cast<double>(half), -1.0, mx::float32),
                                               mx::array(std::log(*kind.base) / static_cast<float>(half), mx::float32)))
                        : mx::reciprocal(mx::array(kind.periods.begin(), {half}, mx::float32));
  turns.eval();
  return std::vector<float>(turns.data<float>(), turns.data<float>() + half);
}

// x [heads, L, size] at `offset`.
mx::array by_pointers(const Kind& kind, const mx::array& x, int offset) {
  const std::vector<float> frequencies = frequencies_of(kind);
  const cpu::RopeView rope{kind.dims, kind.traditional, kind.scale, 1.0f, frequencies.data()};
  const int heads = x.shape(0), length = x.shape(1), size = x.shape(2);
  std::vector<float> out(x.data<float>(), x.data<float>() + x.size());
  std::vector<float> cosines(frequencies.size()), sines(frequencies.size());
  for (int t = 0; t < length; ++t) {
    cpu::rope_angles(rope, static_cast<float>(t) + static_cast<float>(offset), cosines.data(), sines.data());
    for (int h = 0; h < heads; ++h) {
      cpu::rotate_heads(rope, cosines.data(), sines.data(), 1, size, out.data() + (h * length + t) * size);
    }
  }
  return mx::array(out.begin(), x.shape(), mx::float32);
}

std::vector<Kind> kinds() {
  std::vector<Kind> out;
  std::vector<float> periods;
  for (int i = 0; i < 16; ++i)
    periods.push_back(i == 15 ? INFINITY : 1.3f * std::pow(1000.0f, static_cast<float>(i) / 16.0f));
  for (const bool traditional : {false, true}) {
    out.push_back({32, traditional, 1.0f, 10000.0f, {}});
    out.push_back({32, traditional, 0.25f, 500000.0f, {}});
    out.push_back({32, traditional, 1.0f, {}, periods});
    out.push_back({32, traditional, -1.0f, {}, periods});
    out.push_back({20, traditional, 1.0f, 100000.0f, {}});
  }
  return out;
}

void expect_rope_of_mlx() {
  for (const int size : {32, 40, 64}) {
    mx::array x = mx::random::normal({3, 5, size}, mx::float32, 0.0f, 1.0f, mx::random::key(1));
    x.eval();
    for (const Kind& kind : kinds()) {
      std::optional<mx::array> periods;
      if (!kind.base) periods = mx::array(kind.periods.begin(), {kind.dims / 2}, mx::float32);
      for (const int offset : {0, 1, 7, 4000, 131000, -3, 9000000}) {
        SCOPED_TRACE(std::to_string(size) + " " + std::to_string(kind.dims) + " " + std::to_string(kind.traditional) +
                     " " + std::to_string(offset));
        const mx::array expected =
            mx::fast::rope(mx::expand_dims(x, 0), kind.dims, kind.traditional, kind.base, kind.scale, offset, periods);
        const mx::array got = mx::expand_dims(by_pointers(kind, x, offset), 0);
#if defined(__x86_64__)
        EXPECT_TRUE(mx::array_equal(got, expected).item<bool>());
#else
        // There MLX's own build may have fused products and sums.
        EXPECT_TRUE(mx::allclose(got, expected, 1e-5, 1e-5).item<bool>());
#endif
      }
    }
  }
}

TEST(RopeCpu, GivesWhatMlxGivesForEveryKind) { on_each_target(expect_rope_of_mlx); }

TEST(RopeCpu, AnglesAreThoseOfTheRealFunctions) {
  const float frequency = 1.0f;
  const cpu::RopeView rope{2, false, 1.0f, 1.0f, &frequency};
  for (const float position : {0.0f, 0.3f, 1.0f, 5.5f, 1000.25f, 12345.0f, 100000.0f, -2.5f, 8388607.0f, 3e7f}) {
    float cosine = 0, sine = 0;
    cpu::rope_angles(rope, position, &cosine, &sine);
    EXPECT_NEAR(cosine, std::cos(static_cast<double>(position)), std::abs(position) < 2e5f ? 2e-6 : 2e-1) << position;
    EXPECT_NEAR(sine, std::sin(static_cast<double>(position)), std::abs(position) < 2e5f ? 2e-6 : 2e-1) << position;
  }
}

TEST(RopeCpu, TheInputScaleMultipliesOnlyWhatIsRotated) {
  const float frequency = 0.5f;
  const cpu::RopeView rope{2, false, 1.0f, 3.0f, &frequency};
  float cosine = 0, sine = 0;
  cpu::rope_angles(rope, 4.0f, &cosine, &sine);
  std::vector<float> x = {1.0f, 0.0f, 7.0f};
  cpu::rotate_heads(rope, &cosine, &sine, 1, 3, x.data());
  EXPECT_FLOAT_EQ(x[0], 3.0f * cosine);
  EXPECT_FLOAT_EQ(x[1], 3.0f * sine);
  EXPECT_EQ(x[2], 7.0f);
}

}  // namespace
}  // namespace reprise::kernels
