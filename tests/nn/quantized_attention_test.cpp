// Attention over quantised keys and values against float64 attention over the dequantised ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reprise/base/error.h"
#include "reprise/nn/attention.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr float kScale = 0.2f;

struct Sizes {
  int B = 2, H = 4, Hkv = 2, L = 3, S = 7, D = 64, Dv = 32;
};

QuantizedTensor quantized(const mx::array& x, const KVQuantization& quantization) {
  const auto parts = mx::quantize(x, quantization.group_size, quantization.bits);
  return {parts[0], parts[1], parts[2]};
}

mx::array dequantized(const QuantizedTensor& x, const KVQuantization& quantization) {
  return mx::dequantize(x.packed, mx::astype(x.scales, mx::float32), mx::astype(x.biases, mx::float32),
                        quantization.group_size, quantization.bits);
}

struct Problem {
  mx::array queries;
  QuantizedKV keys_values;
};

Problem problem(const Sizes& n, const KVQuantization& quantization = {32, 8}, mx::Dtype dtype = mx::float32) {
  const auto draw = [&](int heads, int length, int size, std::uint64_t seed) {
    return mx::astype(test::normal({n.B, heads, length, size}, seed), dtype);
  };
  return {draw(n.H, n.L, n.D, 1),
          {quantized(draw(n.Hkv, n.S, n.D, 2), quantization), quantized(draw(n.Hkv, n.S, n.Dv, 3), quantization),
           quantization}};
}

// `added` broadcasts to [B, H, L, S]; -inf where a key is not seen.
std::vector<double> reference(const Problem& p, const mx::array& added, const std::optional<mx::array>& sinks = {}) {
  const auto K = dequantized(p.keys_values.keys, p.keys_values.quantization);
  const auto V = dequantized(p.keys_values.values, p.keys_values.quantization);
  const int B = p.queries.shape(0), H = p.queries.shape(1), L = p.queries.shape(2), D = p.queries.shape(3);
  const int Hkv = K.shape(1), S = K.shape(2), Dv = V.shape(3);
  const auto q = test::floats(p.queries), k = test::floats(K), v = test::floats(V);
  const auto add = test::floats(mx::broadcast_to(added, {B, H, L, S}));
  const auto at = [](int i, int size, int j) { return static_cast<std::size_t>(i * size + j); };
  std::vector<double> out;
  for (int row = 0; row < B * H * L; ++row) {
    const int head = row / L / H * Hkv + row / L % H / (H / Hkv);
    std::vector<double> weight;
    double total = sinks ? std::exp(double{test::floats(*sinks)[static_cast<std::size_t>(row / L % H)]}) : 0.0;
    for (int j = 0; j < S; ++j) {
      double dot = 0;
      for (int d = 0; d < D; ++d) dot += double{q[at(row, D, d)]} * k[at(head * S + j, D, d)];
      weight.push_back(std::exp(dot * kScale + add[at(row, S, j)]));
      total += weight.back();
    }
    for (int d = 0; d < Dv; ++d) {
      double sum = 0;
      for (int j = 0; j < S; ++j) sum += weight[static_cast<std::size_t>(j)] / total * v[at(head * S + j, Dv, d)];
      out.push_back(sum);
    }
  }
  return out;
}

void expect_near(const mx::array& got, const std::vector<double>& want, double tolerance = 2e-5) {
  const auto values = test::floats(got);
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(values[i], want[i], tolerance) << "at " << i;
}

mx::array attend(const Problem& p, const Mask& mask = NoMask{}, const std::optional<mx::array>& sinks = {}) {
  return scaled_dot_product_attention(p.queries, p.keys_values, {kScale, mask, sinks});
}

const mx::array nothing = mx::array(0.0f);

// Every third key is hidden, another third in each row, head and query; each query sees some.
mx::array sieve(const mx::Shape& shape) {
  std::vector<bool> sees;
  int total = 1;
  for (const int size : shape) total *= size;
  for (int i = 0; i < total; ++i) sees.push_back((i + i / shape.back()) % 3 != 0);
  return mx::array(sees.begin(), shape, mx::bool_);
}

// What a bool mask means, as a mask to add.
mx::array additive(const mx::array& mask) {
  return mx::where(mask, nothing, mx::array(-std::numeric_limits<float>::infinity()));
}

// Prefers some of the keys that it lets through; exact in bfloat16.
mx::array uneven(const mx::array& mask) {
  return mx::add(additive(mask), mx::multiply(mx::arange(0, mask.shape(-1)), mx::array(0.25f)));
}

TEST(QuantizedAttention, S1S4EveryBatchGroupingAndLengthEqualsTheDequantisedOne) {
  for (const int B : {1, 2, 3}) {
    for (const int R : {1, 4}) {
      for (const int L : {1, 2, 9}) {
        SCOPED_TRACE(std::to_string(B) + " " + std::to_string(R) + " " + std::to_string(L));
        const Sizes n{.B = B, .H = 2 * R, .L = L, .S = 11};
        const Problem p = problem(n);
        const auto out = attend(p);
        EXPECT_EQ(out.shape(), (mx::Shape{n.B, n.H, n.L, n.Dv}));
        expect_near(out, reference(p, nothing));
      }
    }
  }
}

TEST(QuantizedAttention, S4EveryGroupSizeAndNumberOfBitsWorks) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group_size : {32, 64, 128}) {
      for (const int L : {1, 9}) {
        SCOPED_TRACE(std::to_string(bits) + " " + std::to_string(group_size) + " " + std::to_string(L));
        const Problem p = problem({.L = L, .S = 9, .D = 128, .Dv = 256}, {group_size, bits});
        expect_near(attend(p), reference(p, nothing));
      }
    }
  }
}

TEST(QuantizedAttention, S2CausalIsAlignedBottomRight) {
  for (const auto& [L, S] : {std::pair(1, 5), std::pair(2, 5), std::pair(6, 9), std::pair(5, 5)}) {
    const Problem p = problem({.L = L, .S = S});
    const auto sees = mx::tri(L, S, S - L, mx::bool_);
    expect_near(attend(p, Causal{}), reference(p, mx::where(sees, nothing, mx::array(-1e30f))));
  }
}

TEST(QuantizedAttention, S2MasksOfEveryRankAndTypeAreApplied) {
  for (const int L : {1, 6}) {
    const Sizes n{.L = L};
    const Problem p = problem(n);
    for (const mx::Shape& shape : {mx::Shape{n.S}, mx::Shape{L, n.S}, mx::Shape{1, n.S}, mx::Shape{n.H, L, n.S},
                                   mx::Shape{1, L, n.S}, mx::Shape{n.B, 1, L, n.S}, mx::Shape{1, n.H, L, n.S},
                                   mx::Shape{n.B, n.H, L, n.S}, mx::Shape{n.B, 1, 1, n.S}}) {
      SCOPED_TRACE(testing::PrintToString(std::vector<int>(shape.begin(), shape.end())));
      const mx::array sees = sieve(shape);
      expect_near(attend(p, sees), reference(p, additive(sees)));
      expect_near(attend(p, uneven(sees)), reference(p, uneven(sees)));
      expect_near(attend(p, mx::astype(uneven(sees), mx::bfloat16)), reference(p, uneven(sees)));
    }
  }
}

TEST(QuantizedAttention, S2AFullyMaskedRowIsFiniteAndLeavesTheOthersAlone) {
  for (const int L : {2, 6}) {
    const Sizes n{.L = L};
    for (const mx::Dtype dtype : {mx::float32, mx::float16}) {
      const Problem p = problem(n, {32, 8}, dtype);
      const auto first_row = mx::greater_equal(mx::reshape(mx::arange(0, L), {L, 1}), mx::array(1));
      const auto sees = mx::broadcast_to(first_row, {L, n.S});
      for (const mx::array& mask : {sees, additive(sees)}) {
        const auto out = attend(p, mask);
        for (float x : test::floats(out)) ASSERT_TRUE(std::isfinite(x));
        const auto others = [&](const mx::array& x) { return mx::slice(x, {0, 0, 1, 0}, {n.B, n.H, L, n.Dv}); };
        EXPECT_TRUE(mx::allclose(others(out), others(attend(p)), 1e-3, 1e-3).item<bool>());
      }
    }
  }
}

TEST(QuantizedAttention, S3ArgumentsStayAsTheyAre) {
  const Problem p = problem({.L = 6});
  const mx::array mask = additive(sieve({6, 7}));
  const auto all = [&] {
    std::vector<std::vector<float>> values;
    for (const auto& x :
         {p.queries, mask, p.keys_values.keys.packed, p.keys_values.keys.scales, p.keys_values.keys.biases,
          p.keys_values.values.packed, p.keys_values.values.scales, p.keys_values.values.biases}) {
      values.push_back(test::floats(x));
    }
    return values;
  };
  const auto before = all();
  mx::eval(attend(p, mask));
  EXPECT_EQ(all(), before);
}

TEST(QuantizedAttention, S4NarrowQueriesLoseNoMoreThanTheirOwnRounding) {
  for (const auto& [dtype, tolerance] : {std::pair(mx::bfloat16, 8e-3), std::pair(mx::float16, 1e-3)}) {
    for (const int L : {1, 9}) {
      const Problem p = problem({.L = L, .S = 300, .Dv = 64}, {64, 8}, dtype);
      const auto out = attend(p);
      EXPECT_EQ(out.dtype(), dtype);
      const auto got = test::floats(out);
      const auto want = reference(p, nothing);
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], tolerance * std::abs(want[i]) + 1e-6) << "at " << i;
      }
    }
  }
}

TEST(QuantizedAttention, S5DispatchTakesBothKindsOfRows) {
  const Problem p = problem({.L = 5});
  const DenseKV dense{dequantized(p.keys_values.keys, p.keys_values.quantization),
                      dequantized(p.keys_values.values, p.keys_values.quantization)};
  EXPECT_TRUE(
      mx::allclose(attend(p, Causal{}), scaled_dot_product_attention(p.queries, dense, {kScale, Causal{}}), 1e-5, 1e-5)
          .item<bool>());
}

TEST(QuantizedAttention, S5SinksTakeTheirShareOfTheWeight) {
  for (const int L : {1, 6}) {
    const Sizes n{.L = L};
    const Problem p = problem(n);
    const std::vector<float> logits = {-20.0f, 0.5f, 2.0f, 30.0f};
    const mx::array sinks(logits.begin(), {n.H}, mx::float32);
    const auto sees = sieve({n.B, 1, L, n.S});
    expect_near(attend(p, NoMask{}, sinks), reference(p, nothing, sinks));
    expect_near(attend(p, sees, sinks), reference(p, additive(sees), sinks));
    const auto hidden = attend(p, mx::zeros({L, n.S}, mx::bool_), sinks);
    for (float x : test::floats(hidden)) ASSERT_TRUE(std::isfinite(x));
  }
}

TEST(QuantizedAttention, StoredArraysAreTakenAsTheyAre) {
  for (const int L : {1, 9}) {
    const Problem p = problem({.L = L});
    const mx::array out = attend(p);
    const auto is_input = [&](const mx::array& x) {
      const auto& inputs = out.inputs();
      return std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& y) { return y.id() == x.id(); });
    };
    for (const QuantizedTensor& tensor : {p.keys_values.keys, p.keys_values.values}) {
      EXPECT_TRUE(is_input(tensor.packed));
      EXPECT_TRUE(is_input(tensor.scales));
      EXPECT_TRUE(is_input(tensor.biases));
    }
  }
}

TEST(QuantizedAttention, NothingInGivesNothingOut) {
  const Problem p = problem({.L = 2});
  const auto none = [](const mx::array& x) {
    return mx::slice(x, {0, 0, 0, 0}, {0, x.shape(1), x.shape(2), x.shape(3)});
  };
  const auto empty = [&](const QuantizedTensor& x) {
    return QuantizedTensor{none(x.packed), none(x.scales), none(x.biases)};
  };
  const auto& [keys, values, quantization] = p.keys_values;
  EXPECT_EQ(attend({none(p.queries), {empty(keys), empty(values), quantization}}).shape(), (mx::Shape{0, 4, 2, 32}));
  EXPECT_EQ(attend({mx::zeros({2, 4, 0, 64}), p.keys_values}).shape(), (mx::Shape{2, 4, 0, 32}));
}

TEST(QuantizedAttention, WhatDoesNotFitIsRefused) {
  const Problem p = problem({});
  const auto refused = [&](const auto& change) {
    Problem bad = p;
    AttentionScoreOptions options{kScale};
    change(bad, options);
    try {
      scaled_dot_product_attention(bad.queries, bad.keys_values, options);
    } catch (const Error& error) {
      return error.code() == ErrorCode::invalid_argument;
    }
    return false;
  };
  const auto mask = [](const mx::Shape& shape) {
    return [shape](Problem&, auto& o) { o.mask = mx::zeros(shape, mx::bool_); };
  };
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.queries = mx::zeros({2, 3, 3, 64}); }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.queries = mx::zeros({2, 4, 3, 32}); }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.queries = mx::zeros({4, 3, 64}); }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.queries = mx::zeros({2, 4, 3, 64}, mx::int32); }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.keys_values.quantization.group_size = 64; }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.keys_values.quantization.group_size = 0; }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.keys_values.quantization.bits = 7; }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) { bad.keys_values.quantization.bits = 4; }));
  EXPECT_TRUE(refused([](Problem& bad, auto&) {
    bad.keys_values.values = bad.keys_values.keys;
    bad.keys_values.values.scales = mx::zeros({2, 2, 7, 1});
  }));
  EXPECT_TRUE(refused(mask({4, 7})));
  EXPECT_TRUE(refused(mask({3, 6})));
  EXPECT_TRUE(refused(mask({2, 3, 7})));
  EXPECT_TRUE(refused(mask({1, 2, 4, 3, 7})));
  EXPECT_TRUE(refused([](Problem&, auto& o) { o.sinks = mx::zeros({3}); }));
  EXPECT_FALSE(refused([](Problem&, auto&) {}));
}

}  // namespace
}  // namespace reprise
