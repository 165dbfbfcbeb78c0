// Linear operations against float64 products of the same weights, made of MLX's operations.
#include "reprise/kernels/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

// Standard normal values that depend on the seed alone.
mx::array normal(const mx::Shape& shape, std::uint64_t seed) {
  auto x = mx::random::normal(shape, mx::float32, mx::random::key(seed));
  mx::eval(x);
  return x;
}

struct WeightKind {
  int bits;  // 0: dense
  int group_size;
  mx::Dtype dtype;  // of a dense weight, or of scales and biases
};

std::string name_of(const WeightKind& kind) {
  std::string dtype = kind.dtype == mx::float32 ? "float32" : kind.dtype == mx::float16 ? "float16" : "bfloat16";
  return kind.bits == 0
             ? dtype
             : std::to_string(kind.bits) + " bits, groups of " + std::to_string(kind.group_size) + ", " + dtype;
}

// MLX has no groups of 16: both halves of a group of 32 get scales and biases of their own.
QuantizedWeight groups_of_16(const mx::array& w, int bits) {
  const auto parts = mx::quantize(w, 32, bits);
  const auto halves = [&](const mx::array& of_32, float factor) {
    const auto two = mx::stack({of_32, mx::multiply(of_32, mx::array(factor, of_32.dtype()))}, -1);
    return mx::reshape(two, {of_32.shape(0), 2 * of_32.shape(1)});
  };
  return {parts[0], halves(parts[1], 0.75f), halves(parts[2], -0.5f), 16, bits};
}

Weight make_weight(const WeightKind& kind, int out, int in, std::uint64_t seed) {
  const auto w = mx::astype(mx::multiply(normal({out, in}, seed), mx::array(0.1f)), kind.dtype);
  if (kind.bits == 0) return w;
  if (kind.group_size == 16) return groups_of_16(w, kind.bits);
  auto parts = mx::quantize(w, kind.group_size, kind.bits);
  return QuantizedWeight{parts[0], parts[1], parts[2], kind.group_size, kind.bits};
}

AffineMapPtr make_map(const WeightKind& kind, int out, int in, std::uint64_t seed, bool bias = false) {
  AffineMap map{make_weight(kind, out, in, seed)};
  if (bias) map.bias = normal({out}, seed + 1000);
  return std::make_shared<const AffineMap>(map);
}

mx::array exact(const mx::array& x) { return mx::astype(x, mx::float64); }

mx::array exact(const Weight& weight) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return exact(*dense);
  const auto& w = std::get<QuantizedWeight>(weight);
  if (w.group_size == 16) {
    const mx::Shape groups{w.scales.shape(0), w.scales.shape(1) / 2};
    const auto numbers = mx::dequantize(w.packed, mx::ones(groups), mx::zeros(groups), 32, w.bits);
    const auto grouped = exact(mx::reshape(numbers, {groups[0], 2 * groups[1], 16}));
    const auto wide = [](const mx::array& x) { return exact(mx::expand_dims(mx::astype(x, mx::float32), -1)); };
    return mx::reshape(mx::add(mx::multiply(grouped, wide(w.scales)), wide(w.biases)), {groups[0], 32 * groups[1]});
  }
  return exact(mx::dequantize(w.packed, mx::astype(w.scales, mx::float32), mx::astype(w.biases, mx::float32),
                              w.group_size, w.bits));
}

mx::array exact(const mx::array& x, const AffineMap& map) {
  const auto y = mx::matmul(exact(x), mx::transpose(exact(map.weight)));
  return map.bias ? mx::add(y, exact(*map.bias)) : y;
}

mx::array exact(const mx::array& x, const RmsNormParams& norm) {
  const auto wide = exact(x);
  const auto mean = mx::mean(mx::square(wide), -1, true);
  return mx::multiply(mx::divide(wide, mx::sqrt(mx::add(mean, mx::array(norm.eps, mx::float64)))), exact(norm.weight));
}

// max|a - b| / max|b|
double error(const mx::array& got, const mx::array& want) {
  const auto difference = mx::max(mx::abs(mx::subtract(exact(got), exact(want))));
  return mx::divide(difference, mx::maximum(mx::max(mx::abs(exact(want))), mx::array(1e-30, mx::float64)))
      .item<double>();
}

constexpr double kTolerance = 2e-4;

std::vector<WeightKind> every_kind() {
  std::vector<WeightKind> kinds = {{0, 0, mx::float32}, {0, 0, mx::float16}, {0, 0, mx::bfloat16}};
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group_size : {16, 32, 64, 128}) {
      if (group_size == 16 && bits == 4) continue;
      for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) kinds.push_back({bits, group_size, dtype});
    }
  }
  return kinds;
}

TEST(Linear, EveryKindOfWeightEqualsItsProductInFloat64) {
  for (const WeightKind& kind : every_kind()) {
    SCOPED_TRACE(name_of(kind));
    const int in = kind.bits == 0 ? 100 : 384;
    const auto all = normal({40, in}, 7);
    const auto map = make_map(kind, 77, in, 3, true);
    const auto want = exact(all, *map);
    for (const int rows : {1, 2, 7, 8, 9, 40}) {
      const auto x = mx::slice(all, {0, 0}, {rows, in});
      EXPECT_LT(error(linear(x, {map})[0], mx::slice(want, {0, 0}, {rows, 77})), kTolerance) << rows << " rows";
    }
  }
}

TEST(Linear, MicroscaledWeightsEqualTheirProductInFloat64) {
  for (const auto format : {MicroscalingFormat::mxfp4, MicroscalingFormat::mxfp8, MicroscalingFormat::nvfp4}) {
    SCOPED_TRACE(name_of(format));
    auto parts = mx::quantize(normal({77, 384}, 3), group_size_of(format), bits_of(format), name_of(format));
    const Weight weight = MicroscaledWeight{parts[0], parts[1], format};
    const auto map = std::make_shared<const AffineMap>(AffineMap{weight, normal({77}, 4)});
    EXPECT_EQ(map->in(), 384);
    EXPECT_EQ(map->out(), 77);
    const auto values = exact(mx::dequantize(parts[0], parts[1], {}, group_size_of(format), bits_of(format),
                                             name_of(format), {}, mx::float32));
    EXPECT_LT(error(values, exact(normal({77, 384}, 3))), 0.3);
    for (const int rows : {1, 3, 40}) {
      const auto x = normal({rows, 384}, 5);
      const auto want = mx::add(mx::matmul(exact(x), mx::transpose(values)), exact(*map->bias));
      EXPECT_LT(error(linear(x, {map})[0], want), kTolerance) << rows << " rows";
      EXPECT_LT(error(reference::linear(x, {map})[0], want), 1e-5) << rows << " rows";
    }
    const auto ids = mx::array({5, 76, 0}, {3}, mx::int32);
    const auto want = mx::take(values, ids, 0);
    EXPECT_TRUE(mx::array_equal(exact(embedding(ids, weight, mx::float32)), want).item<bool>());
    EXPECT_TRUE(mx::array_equal(exact(reference::embedding(ids, weight, mx::float32)), want).item<bool>());
  }
  const auto packed = mx::zeros({4, 8}, mx::uint32);
  const auto wrong = std::make_shared<const AffineMap>(
      AffineMap{MicroscaledWeight{packed, mx::zeros({4, 3}, mx::uint8), MicroscalingFormat::mxfp4}});
  EXPECT_THROW(linear(normal({1, 96}, 1), {wrong}), Error);
}

TEST(Linear, MapsOfDifferentFormsShareOneNormedInput) {
  const RmsNormParams norm{normal({256}, 1), 1e-5f};
  const std::vector<AffineMapPtr> maps = {
      make_map({4, 32, mx::float16}, 256, 256, 10), make_map({8, 64, mx::bfloat16}, 33, 256, 11, true),
      make_map({4, 32, mx::float16}, 64, 256, 12, true), make_map({0, 0, mx::float32}, 5, 256, 13)};
  for (const auto& shape : {mx::Shape{1, 1, 256}, mx::Shape{2, 3, 256}, mx::Shape{2, 150, 256}, mx::Shape{256}}) {
    const auto x = normal(shape, 2);
    const auto got = linear(x, maps, norm);
    ASSERT_EQ(got.size(), maps.size());
    for (std::size_t i = 0; i < maps.size(); ++i) {
      auto want = shape;
      want.back() = maps[i]->out();
      EXPECT_EQ(got[i].shape(), want);
      EXPECT_LT(error(got[i], exact(exact(x, norm), *maps[i])), kTolerance) << i;
    }
  }
}

// w = scale · (q - 2^(bits - 1)).
QuantizedWeight centred_weight(int out, int in, int bits, mx::Dtype dtype) {
  const auto scales = mx::astype(mx::add(mx::abs(normal({out, in / 32}, 5)), mx::array(0.01f)), dtype);
  const auto biases = mx::multiply(scales, mx::array(-static_cast<float>(1 << (bits - 1)), dtype));
  QuantizedWeight weight{mx::random::bits({out, in * bits / 32}, 4, mx::random::key(6)), scales, biases, 32, bits};
  mx::eval(weight.packed, weight.scales, weight.biases);
  return weight;
}

TEST(Linear, FewRowsOfACentredWeightLeaveItsBiasesUnreadAndChangeNoBit) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      SCOPED_TRACE(std::to_string(bits));
      QuantizedWeight weight = centred_weight(77, 96, bits, dtype);
      ASSERT_TRUE(is_centred(weight));
      QuantizedWeight unread = weight;
      unread.centred = true;
      unread.biases = mx::full(weight.biases.shape(), std::nanf(""), dtype);
      for (const int rows : {1, 2, 8}) {
        const auto x = normal({rows, 96}, 2);
        const auto want = linear(x, {std::make_shared<const AffineMap>(AffineMap{weight})})[0];
        const auto got = linear(x, {std::make_shared<const AffineMap>(AffineMap{unread})})[0];
        EXPECT_TRUE(mx::array_equal(got, want).item<bool>()) << rows;
      }
    }
  }
}

TEST(Linear, OnlyWeightsWithEveryBiasAtTheCentreAreCentred) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const QuantizedWeight weight = centred_weight(20, 128, 8, dtype);
    const auto changed = [&](int row, int group, float scale, float bias) {
      QuantizedWeight other = weight;
      const mx::Shape at{row, group}, end{row + 1, group + 1};
      other.scales = mx::slice_update(weight.scales, mx::full({1, 1}, scale, dtype), at, end);
      other.biases = mx::slice_update(weight.biases, mx::full({1, 1}, bias, dtype), at, end);
      return is_centred(other);
    };
    for (const int row : {0, 19}) {
      EXPECT_TRUE(changed(row, 3, -0.5f, 64.0f));
      EXPECT_TRUE(changed(row, 3, 0.0f, -0.0f));
      EXPECT_FALSE(changed(row, 3, 0.5f, 64.0f));
      EXPECT_FALSE(changed(row, 3, 0.5f, -32.0f));
      EXPECT_FALSE(changed(row, 3, 0.0f, 1.0f));
      EXPECT_FALSE(changed(row, 3, 1e38f, -std::numeric_limits<float>::infinity()));
      EXPECT_FALSE(changed(row, 3, std::nanf(""), std::nanf("")));
    }
    QuantizedWeight narrow = weight;
    narrow.biases = mx::astype(weight.biases, dtype == mx::float16 ? mx::float32 : mx::float16);
    EXPECT_FALSE(is_centred(narrow));
  }
  EXPECT_FALSE(is_centred(std::get<QuantizedWeight>(make_weight({4, 32, mx::float16}, 8, 64, 1))));
}

TEST(Linear, AResidualIsAddedAndKept) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1, true);
  for (const int rows : {1, 5, 70}) {
    const auto x = normal({rows, 64}, 2);
    const auto residual = normal({rows, 96}, 3);
    const auto before = mx::multiply(residual, mx::array(1.0f));
    mx::eval(before);
    EXPECT_LT(error(linear_add(x, map, residual), mx::add(exact(residual), exact(x, *map))), kTolerance);
    EXPECT_TRUE(mx::array_equal(residual, before).item<bool>());
  }
}

TEST(Linear, AResultIsNormedBeforeTheResidualIsAdded) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1, true);
  const RmsNormParams norm{normal({96}, 4), 1e-5f};
  for (const int rows : {1, 5, 70, 1500}) {
    const auto x = normal({rows, 64}, 2);
    const auto residual = normal({rows, 96}, 3);
    const auto want = mx::add(exact(residual), exact(exact(x, *map), norm));
    EXPECT_LT(error(linear_add(x, map, residual, norm), want), kTolerance) << rows;
    EXPECT_LT(error(reference::linear_add(x, map, residual, norm), want), kTolerance) << rows;
  }
}

TEST(Linear, AResidualBeyondFloat16IsItsLargestNumberWhereResultsAreNormed) {
  const auto map = make_map({0, 0, mx::float32}, 8, 8, 1);
  const RmsNormParams norm{mx::full({8}, 9e3f), 1e-5f};
  const auto x = mx::astype(normal({3, 8}, 2), mx::float16);
  const auto residual = mx::full({3, 8}, 65000.0f, mx::float16);
  for (const auto& out : {linear_add(x, map, residual, norm), reference::linear_add(x, map, residual, norm)}) {
    EXPECT_EQ(mx::max(mx::astype(out, mx::float32)).item<float>(), 65504.0f);
  }
}

mx::array exact_mlp(const mx::array& x, const AffineMap& gate, const AffineMap& up, const AffineMap& down,
                    GateActivation activation) {
  const auto g = exact(x, gate);
  const auto number = [](double value) { return mx::array(value, mx::float64); };
  const auto inner = mx::multiply(number(0.7978845608028654),
                                  mx::add(g, mx::multiply(number(0.044715), mx::multiply(g, mx::multiply(g, g)))));
  const auto sigmoid = [&](const mx::array& y) {
    return mx::divide(number(1), mx::add(number(1), mx::exp(mx::negative(y))));
  };
  const auto gated = mx::multiply(g, sigmoid(activation == GateActivation::silu ? g : mx::multiply(number(2), inner)));
  return exact(mx::multiply(gated, exact(x, up)), down);
}

TEST(GatedMlp, EqualsItsPartsInFloat64) {
  const RmsNormParams norm{normal({64}, 1), 1e-6f};
  const WeightKind narrow{4, 32, mx::float16};
  for (const bool bias : {false, true}) {
    const auto gate = make_map(narrow, 192, 64, 2, bias);
    const auto up = make_map(narrow, 192, 64, 3, bias);
    const auto down = make_map({8, 64, mx::float16}, 64, 192, 4, bias);
    for (const auto activation : {GateActivation::silu, GateActivation::gelu_tanh}) {
      for (const int rows : {1, 3, 8, 9, 65, 1500}) {
        const auto x = mx::multiply(normal({1, rows, 64}, 5), mx::array(3.0f));
        const auto residual = normal({1, rows, 64}, 6);
        const auto want = exact_mlp(exact(x, norm), *gate, *up, *down, activation);
        EXPECT_LT(error(gated_mlp(x, gate, up, down, activation, norm, residual), mx::add(want, exact(residual))),
                  kTolerance)
            << rows;
        const RmsNormParams output_norm{normal({64}, 7), 1e-6f};
        const auto normed = mx::add(exact(want, output_norm), exact(residual));
        EXPECT_LT(error(gated_mlp(x, gate, up, down, activation, norm, residual, output_norm), normed), kTolerance)
            << rows;
        EXPECT_LT(error(reference::gated_mlp(x, gate, up, down, activation, norm, residual, output_norm), normed),
                  kTolerance)
            << rows;
        EXPECT_LT(error(gated_mlp(x, gate, up, down, activation, {}, {}), exact_mlp(x, *gate, *up, *down, activation)),
                  kTolerance)
            << rows;
      }
    }
  }
}

TEST(GatedMlp, OddSizesAndDenseWeights) {
  const auto gate = make_map({0, 0, mx::bfloat16}, 37, 19, 2);
  const auto up = make_map({0, 0, mx::float16}, 37, 19, 3, true);
  const auto down = make_map({0, 0, mx::float32}, 19, 37, 4);
  for (const int rows : {1, 12}) {
    const auto x = normal({rows, 19}, 5);
    EXPECT_LT(error(gated_mlp(x, gate, up, down, GateActivation::silu, {}, x),
                    mx::add(exact(x), exact_mlp(x, *gate, *up, *down, GateActivation::silu))),
              kTolerance);
  }
}

TEST(RmsNorm, EqualsFloat64AlsoForManyRowsAndOddSizes) {
  for (const int size : {1, 7, 64, 577}) {
    for (const int rows : {1, 3, 100}) {
      const RmsNormParams norm{normal({size}, 1), 1e-5f};
      const auto x = normal({rows, size}, 2);
      EXPECT_LT(error(rms_norm(x, norm), exact(x, norm)), 1e-6) << size;
    }
  }
}

TEST(Linear, NarrowInputsGiveTheirOwnDtypeRoundedOnce) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1, true);
  const RmsNormParams norm{mx::astype(normal({64}, 9), mx::bfloat16), 1e-5f};
  for (const mx::Dtype dtype : {mx::float16, mx::bfloat16}) {
    const double rounding = dtype == mx::float16 ? 6e-4 : 5e-3;
    for (const int rows : {1, 30}) {
      const auto x = mx::astype(normal({rows, 64}, 2), dtype);
      const auto residual = mx::astype(normal({rows, 96}, 3), dtype);
      const auto got = linear(x, {map, map}, norm);
      EXPECT_EQ(got[1].dtype(), dtype);
      EXPECT_LT(error(got[1], exact(exact(x, norm), *map)), rounding);
      const auto sum = linear_add(x, map, residual);
      EXPECT_EQ(sum.dtype(), dtype);
      EXPECT_LT(error(sum, mx::add(exact(residual), exact(x, *map))), rounding);
      EXPECT_EQ(rms_norm(x, norm).dtype(), dtype);
      EXPECT_LT(error(rms_norm(x, norm), exact(x, norm)), rounding);
    }
  }
}

TEST(Linear, InputsOfAnyLayoutAreReadRight) {
  const auto map = make_map({8, 32, mx::float32}, 40, 64, 1);
  const auto cube = normal({5, 64, 6}, 2);
  const std::vector<mx::array> layouts = {mx::transpose(cube, {0, 2, 1}),
                                          mx::transpose(cube, {2, 0, 1}),
                                          mx::slice(normal({5, 9, 80}, 3), {0, 2, 8}, {5, 9, 72}, {1, 3, 1}),
                                          mx::broadcast_to(normal({1, 1, 64}, 4), {3, 4, 64}),
                                          mx::slice(normal({3, 4, 128}, 5), {0, 0, 0}, {3, 4, 128}, {1, 1, 2}),
                                          mx::astype(mx::transpose(cube, {0, 2, 1}), mx::float16)};
  for (const auto& x : layouts) {
    const auto residual = mx::broadcast_to(mx::array(0.5f), {x.shape(0), x.shape(1), 40});
    EXPECT_LT(error(linear(x, {map})[0], exact(x, *map)), x.dtype() == mx::float16 ? 1e-3 : kTolerance);
    EXPECT_LT(error(linear_add(x, map, residual), mx::add(exact(residual), exact(x, *map))), 1e-3);
  }
}

TEST(Linear, NoRowsGiveNoRows) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1);
  const auto x = mx::zeros({2, 0, 64}, mx::float16);
  const auto got = linear(x, {map, map});
  ASSERT_EQ(got.size(), 2u);
  EXPECT_EQ(got[0].shape(), (mx::Shape{2, 0, 96}));
  EXPECT_EQ(got[1].dtype(), mx::float16);
  EXPECT_EQ(linear_add(x, map, mx::zeros({2, 0, 96}, mx::float16)).shape(), (mx::Shape{2, 0, 96}));
  EXPECT_EQ(rms_norm(x, {mx::ones({64}), 1e-5f}).shape(), x.shape());
  EXPECT_TRUE(linear(x, {}).empty());
}

TEST(Linear, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto maps = {make_map({4, 32, mx::float16}, 500, 256, 1), make_map({6, 64, mx::float16}, 70, 256, 2)};
  const auto down = make_map({4, 32, mx::float16}, 256, 512, 3);
  const auto gate = make_map({4, 32, mx::float16}, 512, 256, 4);
  const int before = ThreadPool::process().threads();
  for (const int rows : {1, 4, 200}) {
    const auto x = normal({rows, 256}, 5);
    std::vector<std::vector<mx::array>> results;
    for (const int threads : {1, 2, 5}) {
      ThreadPool::set_process_threads(threads);
      auto result = linear(x, maps);
      result.push_back(gated_mlp(x, gate, gate, down, GateActivation::silu, {}, x));
      mx::eval(result);
      results.push_back(result);
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(mx::array_equal(results[0][i], results[1][i]).item<bool>());
      EXPECT_TRUE(mx::array_equal(results[0][i], results[2][i]).item<bool>());
    }
  }
  ThreadPool::set_process_threads(before);
}

TEST(Linear, AnUnevaluatedOperationKeepsItsWeights) {
  auto map = make_map({4, 32, mx::float16}, 96, 64, 1, true);
  const auto x = normal({1, 64}, 2);
  const auto want = exact(x, *map);
  mx::eval(want);
  const auto got = linear(x, {map}, RmsNormParams{mx::astype(mx::ones({64}), mx::bfloat16), 0.0f});
  const auto plain = linear(x, {map});
  map.reset();
  mx::eval({got[0], plain[0]});
  EXPECT_LT(error(plain[0], want), kTolerance);
}

TEST(Linear, WhatKernelsCannotReadTheReferenceDoes) {
  const auto x = normal({3, 64}, 2);
  const AffineMap wide{mx::astype(normal({40, 64}, 1), mx::float64)};
  const AffineMap turned{mx::transpose(normal({64, 40}, 1))};
  for (const AffineMap& map : {wide, turned}) {
    const auto shared = std::make_shared<const AffineMap>(map);
    EXPECT_LT(error(linear(x, {shared})[0], exact(x, map)), kTolerance);
  }
}

TEST(Linear, InAReferenceScopeResultsAreTheReferences) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1);
  const auto x = normal({1, 64}, 2);
  const auto want = reference::linear(x, {map})[0];
  EXPECT_STREQ(linear(x, {map})[0].primitive().name(), "linear");
  const reference::Scope scope;
  const auto got = linear(x, {map})[0];
  EXPECT_STRNE(got.primitive().name(), "linear");
  EXPECT_TRUE(mx::array_equal(got, want).item<bool>());
}

void expect_refused(const std::function<void()>& call, const std::string& word) {
  try {
    call();
    FAIL() << "accepted; expected a message with " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(Linear, WhatDoesNotFitIsRefusedByName) {
  const auto map = make_map({4, 32, mx::float16}, 96, 64, 1);
  const auto x = normal({1, 64}, 2);
  expect_refused([&] { linear(normal({1, 32}, 1), {map}); }, "[linear] x must be floating [..., 64], but got a last");
  expect_refused([&] { linear(mx::array(1.0f), {map}); }, "scalar");
  expect_refused([&] { linear(mx::zeros({1, 64}, mx::int32), {map}); }, "floating");
  expect_refused([&] { linear(x, {nullptr}); }, "null");
  expect_refused([&] { linear(x, {map}, RmsNormParams{mx::ones({65}), 1e-5f}); }, "norm's weight must be [64]");
  expect_refused([&] { linear_add(x, map, x); }, "[linear_add] the residual");
  expect_refused([&] { gated_mlp(x, map, map, map, GateActivation::silu, {}, {}); }, "[gated_mlp] gate and up");
  expect_refused([&] { rms_norm(x, {mx::ones({65}), 1e-5f}); }, "[rms_norm]");

  const auto refuse_weight = [&](const std::string& word, const std::function<void(AffineMap&)>& damage) {
    AffineMap damaged = *map;
    damage(damaged);
    expect_refused([&] { linear(x, {std::make_shared<const AffineMap>(damaged)}); }, word);
  };
  const auto packed = [](AffineMap& m) -> QuantizedWeight& { return std::get<QuantizedWeight>(m.weight); };
  refuse_weight("7 in groups", [&](AffineMap& m) { packed(m).bits = 7; });
  refuse_weight("4 in groups of 16", [&](AffineMap& m) { packed(m).group_size = 16; });
  refuse_weight("groups of 48", [&](AffineMap& m) { packed(m).group_size = 48; });
  refuse_weight("[96, 9]", [&](AffineMap& m) { packed(m).packed = mx::zeros({96, 9}, mx::uint32); });
  refuse_weight("packed uint32", [&](AffineMap& m) { packed(m).packed = mx::zeros({96, 8}, mx::int32); });
  refuse_weight("one floating dtype", [&](AffineMap& m) { packed(m).biases = mx::zeros({96, 2}); });
  refuse_weight("bias must be [96]", [&](AffineMap& m) { m.bias = mx::zeros({95}); });
  refuse_weight("dense weight", [&](AffineMap& m) { m.weight = mx::zeros({96}); });
}

TEST(Embedding, EveryKindOfWeightGivesItsRows) {
  const mx::array ids({9, 0, 3, 3}, {2, 2}, mx::int32);
  for (const WeightKind& kind : every_kind()) {
    SCOPED_TRACE(name_of(kind));
    const auto weight = make_weight(kind, 10, 128, 1);
    const auto want = mx::take(exact(weight), ids, 0);
    EXPECT_LT(error(embedding(ids, weight, mx::float32), want), 1e-6);
    const auto narrow = embedding(ids, weight, mx::bfloat16);
    EXPECT_EQ(narrow.dtype(), mx::bfloat16);
    EXPECT_EQ(narrow.shape(), (mx::Shape{2, 2, 128}));
    EXPECT_LT(error(narrow, want), 5e-3);
  }
}

TEST(Embedding, IdsOfAnyLayoutAndDtype) {
  const auto weight = make_weight({4, 32, mx::float16}, 300, 64, 1);
  const auto table = exact(weight);
  const auto many = mx::astype(mx::remainder(mx::arange(0, 5000, 7, mx::int32), mx::array(300)), mx::int32);
  for (const auto& ids : {many, mx::transpose(mx::reshape(mx::slice(many, {0}, {600}), {20, 30})),
                          mx::astype(many, mx::uint32), mx::array({5}, {1, 1}, mx::int64), mx::array(7)}) {
    EXPECT_LT(error(embedding(ids, weight, mx::float32), mx::take(table, ids, 0)), 1e-6);
  }
  EXPECT_EQ(embedding(mx::zeros({0, 3}, mx::int32), weight, mx::float32).shape(), (mx::Shape{0, 3, 64}));
}

TEST(Embedding, IdsOutsideTheTableAreRefusedNotRead) {
  const auto weight = make_weight({4, 32, mx::float16}, 10, 64, 1);
  for (const int id : {-1, 10, 1 << 30}) {
    EXPECT_THROW(mx::eval(embedding(mx::array({id}), weight, mx::float32)), std::runtime_error) << id;
  }
  expect_refused([&] { embedding(mx::array(1.0f), weight, mx::float32); }, "integers");
}

}  // namespace
}  // namespace reprise::kernels
