// The short convolution's kernel against the reference (which tests/nn holds against a loop), on every instruction set.
#include "reprise/kernels/short_conv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/reference.h"
#include "tests/kernels/each_target.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

mx::array normal(const mx::Shape& shape, std::uint64_t seed) {
  auto x = mx::random::normal(shape, mx::float32, mx::random::key(seed));
  x.eval();
  return x;
}

std::vector<float> floats(const mx::array& array) {
  auto x = mx::contiguous(mx::astype(array, mx::float32));
  x.eval();
  return {x.data<float>(), x.data<float>() + x.size()};
}

void expect_near(const mx::array& got, const std::vector<float>& want, float tolerance = 2e-6f) {
  const auto values = floats(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(values[i], want[i], tolerance * (1.0f + std::abs(want[i]))) << i;
  }
}

struct Sample {
  std::string text;
  ShortConvInputs inputs;
  ShortConvParams params;
  std::vector<float> output;
  std::vector<float> state;
};

std::vector<Sample> samples() {
  const reference::Scope scope;
  std::vector<Sample> all;
  int i = 0;
  for (const int C : {1, 5, 16, 63, 64, 70, 130}) {
    for (const int K : {1, 2, 4}) {
      for (const int L : {1, 2, 9}) {
        ++i;
        const int B = 1 + i % 2;
        ShortConvInputs inputs{.x = normal({B, L, C}, 1)};
        if (i % 3 != 0) inputs.state = normal({B, K - 1, C}, 2);
        if (i % 4 == 0) inputs.lengths = std::vector<int>{L + 5, -2};
        if (i % 4 == 1) inputs.lengths = std::vector<int>{L / 2, L};
        if (inputs.lengths) inputs.lengths->resize(static_cast<std::size_t>(B));
        if (i % 5 < 2) {
          inputs.mask = mx::greater_equal(mx::arange(0, L, mx::int32),
                                          mx::slice(mx::array({1, 0}, {2, 1}, mx::int32), {0, 0}, {B, 1}));
        }
        ShortConvParams params{.weight = normal({C, K}, 3)};
        if (i % 2 == 0) params.bias = normal({C}, 4);
        if (i % 7 < 4) params.activation = ConvActivation::silu;
        const auto want = short_conv(inputs, params);
        all.push_back({"C " + std::to_string(C) + ", K " + std::to_string(K) + ", L " + std::to_string(L), inputs,
                       params, floats(want.output), floats(want.state)});
      }
    }
  }
  return all;
}

TEST(ShortConvKernel, EqualsTheReferenceOnEveryTarget) {
  const std::vector<Sample> all = samples();
  on_each_target([&] {
    for (const Sample& sample : all) {
      SCOPED_TRACE(sample.text);
      const auto got = short_conv(sample.inputs, sample.params);
      expect_near(got.output, sample.output);
      EXPECT_EQ(floats(got.state), sample.state);
    }
  });
}

TEST(ShortConvKernel, TakesAnyLayoutAndDtype) {
  const ShortConvParams params{.weight = normal({20, 4}, 1), .bias = normal({20}, 2)};
  const auto x = normal({2, 6, 20}, 3);
  const auto state = normal({2, 3, 20}, 4);
  const auto want = floats(short_conv({.x = x, .state = state}, params).output);
  const auto wide = mx::slice(mx::concatenate({x, x}, 2), {0, 0, 20}, {2, 6, 40});
  const auto turned = mx::swapaxes(mx::contiguous(mx::swapaxes(x, 1, 2)), 1, 2);
  const auto turned_state = mx::swapaxes(mx::contiguous(mx::swapaxes(state, 0, 1)), 0, 1);
  for (const auto& same : {wide, turned}) {
    EXPECT_EQ(floats(short_conv({.x = same, .state = turned_state}, params).output), want);
  }
  for (const auto dtype : {mx::bfloat16, mx::float16}) {
    const auto narrow = short_conv({.x = mx::astype(x, dtype), .state = state}, params);
    EXPECT_EQ(narrow.output.dtype(), dtype);
    EXPECT_EQ(narrow.state.dtype(), dtype);
    expect_near(narrow.output, want, 0.02f);
  }
}

TEST(ShortConvKernel, ResultsDoNotDependOnTheNumberOfThreads) {
  const ShortConvParams params{.weight = normal({300, 4}, 1), .activation = ConvActivation::silu};
  const ShortConvInputs inputs{.x = normal({2, 50, 300}, 2)};
  const int before = ThreadPool::process().threads();
  std::vector<std::vector<float>> outputs;
  for (const int threads : {1, 3}) {
    ThreadPool::set_process_threads(threads);
    outputs.push_back(floats(short_conv(inputs, params).output));
  }
  ThreadPool::set_process_threads(before);
  EXPECT_EQ(outputs[0], outputs[1]);
}

}  // namespace
}  // namespace reprise::kernels
