// Maps of which each row takes its own, against the same made of MLX's gathering products.
#include "reprise/kernels/experts.h"

#include <gtest/gtest.h>

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
  mx::eval(x);
  return x;
}

mx::array choices(int tokens, int k, int experts, std::uint64_t seed) {
  // Different ones for each token, as routers choose.
  const auto order = mx::argsort(normal({tokens, experts}, seed), -1);
  auto chosen = mx::slice(order, {0, 0}, {tokens, k});
  mx::eval(chosen);
  return chosen;
}

struct Kind {
  const char* name;
  int bits;  // 0: dense
  int group_size;
  mx::Dtype dtype;  // of a dense weight or of scales and biases
  std::optional<MicroscalingFormat> format = {};
};

const std::vector<Kind> kKinds = {
    {"float32", 0, 0, mx::float32},
    {"bfloat16", 0, 0, mx::bfloat16},
    {"4-bit", 4, 32, mx::float16},
    {"8-bit", 8, 64, mx::bfloat16},
    {"3-bit", 3, 64, mx::float32},
    {"mxfp4", 4, 32, mx::float32, MicroscalingFormat::mxfp4},
    {"mxfp8", 8, 32, mx::float32, MicroscalingFormat::mxfp8},
    {"nvfp4", 4, 16, mx::float32, MicroscalingFormat::nvfp4},
};

ExpertMapsPtr make_maps(const Kind& kind, int experts, int out, int in, std::uint64_t seed, bool bias = false) {
  const auto w = mx::multiply(normal({experts, out, in}, seed), mx::array(0.1f));
  ExpertMaps maps{[&]() -> Weight {
    if (kind.format) {
      auto parts = mx::quantize(w, kind.group_size, kind.bits, name_of(*kind.format));
      return MicroscaledWeight{parts[0], parts[1], *kind.format};
    }
    if (kind.bits == 0) return mx::astype(w, kind.dtype);
    auto parts = mx::quantize(mx::astype(w, kind.dtype), kind.group_size, kind.bits);
    return QuantizedWeight{parts[0], parts[1], parts[2], kind.group_size, kind.bits};
  }()};
  if (bias) maps.bias = normal({experts, out}, seed + 1000);
  return std::make_shared<const ExpertMaps>(maps);
}

// max|a - b| / max|b|
double error(const mx::array& got, const mx::array& want) {
  EXPECT_EQ(got.shape(), want.shape());
  const auto a = mx::astype(got, mx::float32);
  const auto b = mx::astype(want, mx::float32);
  return static_cast<double>(mx::divide(mx::max(mx::abs(mx::subtract(a, b))), mx::max(mx::abs(b))).item<float>());
}

constexpr double kTolerance = 2e-4;

TEST(Experts, TheReferenceEqualsOneProductASlot) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    const auto maps = make_maps(kind, 3, 20, 64, 1, true);
    const auto x = normal({2, 64}, 2);
    const std::vector<int> ids = {2, 0, 1, 2};
    const auto got = reference::switch_linear(x, mx::array(ids.data(), {2, 2}, mx::int32), maps);
    const auto dense = reference::unpacked(maps->weight, mx::float32);
    for (int slot = 0; slot < 4; ++slot) {
      const int e = ids[static_cast<std::size_t>(slot)];
      const auto row = mx::take(x, slot / 2, 0);
      const auto want = mx::add(mx::matmul(mx::take(dense, e, 0), row), mx::take(*maps->bias, e, 0));
      EXPECT_LT(error(mx::take(mx::reshape(got, {4, 20}), slot, 0), want), 1e-5) << slot;
    }
  }
}

TEST(Experts, EveryKindOfWeightEqualsTheReferenceOnEveryTarget) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    const auto maps = make_maps(kind, 5, 77, 128, 3, true);
    for (const auto& [tokens, k] : {std::pair{1, 1}, {1, 4}, {3, 2}, {33, 2}, {60, 5}}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(k) + " experts each");
      const auto experts = choices(tokens, k, 5, 4);
      for (const auto& x : {normal({tokens, 128}, 5), normal({tokens, k, 128}, 6)}) {
        auto want = reference::switch_linear(x, experts, maps);
        mx::eval(want);
        on_each_target([&] { EXPECT_LT(error(switch_linear(x, experts, maps), want), kTolerance); });
      }
    }
  }
}

TEST(Experts, AGatedBlockEqualsTheReferenceOnEveryTarget) {
  const std::vector<ExpertActivation> activations = {GateActivation::silu, GateActivation::gelu_tanh,
                                                     ClippedSwiglu{1.702f, 0.8f}};
  for (const ExpertActivation& activation : activations) {
    SCOPED_TRACE(activation.index() == 1 ? 2 : static_cast<int>(std::get<GateActivation>(activation)));
    for (const Kind& kind : {kKinds[0], kKinds[2], kKinds[5]}) {
      SCOPED_TRACE(kind.name);
      const ExpertGlu glu{make_maps(kind, 6, 96, 64, 1, true), make_maps(kKinds[4], 6, 96, 64, 2, true),
                          make_maps(kind, 6, 64, 96, 3, true), activation};
      for (const int tokens : {1, 2, 50}) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens");
        const auto x = normal({1, tokens, 64}, 7);
        const auto experts = mx::reshape(choices(tokens, 3, 6, 8), {1, tokens, 3});
        const auto weights = mx::softmax(normal({1, tokens, 3}, 9), -1);
        auto want = reference::switch_glu(x, experts, glu);
        auto sums = reference::switch_glu(x, experts, glu, weights);
        mx::eval(want, sums);
        on_each_target([&] {
          EXPECT_LT(error(switch_glu(x, experts, glu), want), kTolerance);
          EXPECT_LT(error(switch_glu(x, experts, glu, weights), sums), kTolerance);
        });
      }
    }
  }
}

TEST(Experts, ResultsDoNotDependOnTheNumberOfThreads) {
  const ExpertGlu glu{make_maps(kKinds[2], 6, 192, 128, 1), make_maps(kKinds[2], 6, 192, 128, 2),
                      make_maps(kKinds[2], 6, 128, 192, 3)};
  const auto experts = choices(70, 2, 6, 8);
  const auto x = normal({70, 128}, 7);
  const auto run = [&](int threads) {
    ThreadPool::set_process_threads(threads);
    auto out = switch_glu(x, experts, glu, mx::full({70, 2}, 0.5f));
    mx::eval(out);
    return out;
  };
  const auto one = run(1);
  EXPECT_TRUE(mx::array_equal(run(2), one).item<bool>());
  EXPECT_TRUE(mx::array_equal(run(5), one).item<bool>());
  ThreadPool::set_process_threads(2);
}

TEST(Experts, AnExpertMayBeChosenTwiceAndInputsOfOtherDtypesAndLayoutsAreTaken) {
  const auto maps = make_maps(kKinds[2], 4, 40, 64, 1);
  const auto ids = mx::array({1, 1, 3, 1}, {2, 2}, mx::int64);
  const auto x = mx::astype(mx::transpose(normal({64, 2}, 2)), mx::bfloat16);
  const auto got = switch_linear(x, ids, maps);
  EXPECT_EQ(got.dtype(), mx::bfloat16);
  EXPECT_LT(error(got, reference::switch_linear(mx::astype(x, mx::float32), ids, maps)), 1e-2);
}

TEST(Experts, WhatDoesNotFitIsRefused) {
  const auto maps = make_maps(kKinds[2], 4, 40, 64, 1);
  const auto ids = mx::array({0, 1}, {1, 2}, mx::int32);
  EXPECT_THROW(switch_linear(normal({1, 32}, 1), ids, maps), Error);
  EXPECT_THROW(switch_linear(normal({2, 64}, 1), ids, maps), Error);
  EXPECT_THROW(switch_linear(normal({1, 64}, 1), mx::array({0.5f}), maps), Error);
  EXPECT_THROW(switch_linear(normal({1, 64}, 1), ids, nullptr), Error);
  const ExpertGlu glu{maps, maps, maps};
  EXPECT_THROW(switch_glu(normal({1, 64}, 1), ids, glu), Error);
  for (const int id : {-1, 4}) {
    auto out = switch_linear(normal({1, 64}, 1), mx::array({0, id}, {1, 2}, mx::int32), maps);
    EXPECT_THROW(mx::eval(out), std::runtime_error) << id;
  }
}

}  // namespace
}  // namespace reprise::kernels
