#include "reprise/kernels/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "hwy/targets.h"

namespace reprise::kernels::cpu {
namespace {

std::vector<float> normal(std::size_t n, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> out(n);
  for (float& x : out) x = distribution(random);
  return out;
}

// Once for each instruction set that is compiled in and that this machine has.
void on_every_target(const std::function<void()>& check) {
  const auto supported = static_cast<std::uint64_t>(hwy::SupportedTargets());
  for (std::uint64_t left = supported; left != 0; left &= left - 1) {
    const auto target = static_cast<std::int64_t>(left & (~left + 1));
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

const std::vector<std::size_t> kSizes = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 127, 576};

TEST(Elementwise, RmsNormIsThatOfFloat64) {
  on_every_target([] {
    for (const std::size_t size : kSizes) {
      const auto x = normal(3 * (size + 2), 1, 4.0f);
      const auto weight = normal(size, 2);
      std::vector<float> out(3 * size);
      rms_norm(x.data(), size + 2, 3, static_cast<int>(size), weight.data(), 1e-5f, out.data(), size);
      for (std::size_t m = 0; m < 3; ++m) {
        double sum = 0.0;
        for (std::size_t k = 0; k < size; ++k) sum += std::pow(static_cast<double>(x[m * (size + 2) + k]), 2);
        const double factor = 1.0 / std::sqrt(sum / static_cast<double>(size) + 1e-5);
        for (std::size_t k = 0; k < size; ++k) {
          const double want = static_cast<double>(x[m * (size + 2) + k]) * factor * static_cast<double>(weight[k]);
          EXPECT_NEAR(out[m * size + k], want, 2e-6 * (1.0 + std::abs(want)));
        }
      }
    }
  });
}

TEST(Elementwise, RmsNormWorksInPlace) {
  auto x = normal(70, 1);
  const auto weight = normal(70, 2);
  std::vector<float> out(70);
  rms_norm(x.data(), 70, 1, 70, weight.data(), 1e-5f, out.data(), 70);
  rms_norm(x.data(), 70, 1, 70, weight.data(), 1e-5f, x.data(), 70);
  EXPECT_EQ(x, out);
}

TEST(Elementwise, AddTakesEitherBothOrNone) {
  on_every_target([] {
    for (const std::size_t size : kSizes) {
      const auto bias = normal(size, 1);
      const auto residual = normal(2 * (size + 1), 2);
      for (const bool with_bias : {false, true}) {
        for (const bool with_residual : {false, true}) {
          const auto before = normal(2 * (size + 3), 3);
          auto out = before;
          add(with_bias ? bias.data() : nullptr, with_residual ? residual.data() : nullptr, size + 1, 2,
              static_cast<int>(size), out.data(), size + 3);
          for (std::size_t m = 0; m < 2; ++m) {
            for (std::size_t k = 0; k < size + 3; ++k) {
              float want = before[m * (size + 3) + k];
              if (k < size && with_bias) want += bias[k];
              if (k < size && with_residual) want += residual[m * (size + 1) + k];
              EXPECT_EQ(out[m * (size + 3) + k], want);
            }
          }
        }
      }
    }
  });
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double gelu_tanh(double x) { return 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

TEST(Elementwise, ActivationsAreThoseOfFloat64) {
  on_every_target([] {
    for (const std::size_t size : kSizes) {
      const auto gate = normal(size, 1, 5.0f);
      const auto up = normal(size, 2);
      auto silus = gate;
      auto gelus = gate;
      silu_times(silus.data(), up.data(), size);
      gelu_tanh_times(gelus.data(), up.data(), size);
      for (std::size_t k = 0; k < size; ++k) {
        const auto g = static_cast<double>(gate[k]);
        const auto u = static_cast<double>(up[k]);
        EXPECT_NEAR(silus[k], silu(g) * u, 1e-6 * (1.0 + std::abs(g * u))) << g;
        EXPECT_NEAR(gelus[k], gelu_tanh(g) * u, 1e-6 * (1.0 + std::abs(g * u))) << g;
      }
    }
  });
}

TEST(Elementwise, ActivationsOfHugeNumbersAreTheirLimits) {
  on_every_target([] {
    constexpr float kHuge = std::numeric_limits<float>::max();
    for (const auto& act : {silu_times, gelu_tanh_times}) {
      std::vector<float> gate = {
          1e4f, -1e4f, 200.0f, -200.0f, kHuge, -kHuge, 0.0f, -0.0f, std::numeric_limits<float>::quiet_NaN()};
      const std::vector<float> up(gate.size(), 1.0f);
      act(gate.data(), up.data(), gate.size());
      const std::vector<float> want = {1e4f, 0.0f, 200.0f, 0.0f, kHuge, 0.0f, 0.0f, 0.0f};
      for (std::size_t i = 0; i < want.size(); ++i) EXPECT_EQ(gate[i], want[i]) << i;
      EXPECT_TRUE(std::isnan(gate.back()));
    }
  });
}

}  // namespace
}  // namespace reprise::kernels::cpu
