// Attention as an operation against the one made of MLX's operations: layouts, dtypes and what is broadcast.
#include "reprise/kernels/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "reprise/base/profile.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

mx::array normal(const mx::Shape& shape, std::uint64_t seed) {
  mx::array x = mx::random::normal(shape, mx::float32, mx::random::key(seed));
  mx::eval(x);
  return x;
}

mx::array in_float32(const mx::array& x) { return mx::astype(x, mx::float32); }

QuantizedTensor quantized(const mx::array& x, const KVQuantization& quantization) {
  const auto parts = mx::quantize(x, quantization.group_size, quantization.bits);
  return {parts[0], parts[1], parts[2]};
}

// Columns [2, 2 + S) of a buffer that holds more.
mx::array view(const mx::array& buffer, int columns) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[2] = 2;
  stop[2] = 2 + columns;
  return mx::slice(buffer, start, stop);
}

void expect_near(const mx::array& got, const mx::array& want, double tolerance = 2e-5) {
  ASSERT_EQ(got.shape(), want.shape());
  ASSERT_EQ(got.dtype(), want.dtype());
  EXPECT_TRUE(mx::allclose(in_float32(got), in_float32(want), tolerance, tolerance).item<bool>());
}

// The reference with everything in float32, rounded once.
mx::array reference_of(const mx::array& queries, KeysValues keys_values, AttentionParams params) {
  if (auto* dense = std::get_if<DenseKV>(&keys_values)) {
    *dense = {in_float32(dense->keys), in_float32(dense->values)};
  }
  if (auto* mask = std::get_if<mx::array>(&params.mask); mask && mask->dtype() != mx::bool_) *mask = in_float32(*mask);
  if (params.sinks) params.sinks = in_float32(*params.sinks);
  return mx::astype(reference::attention(in_float32(queries), keys_values, params), queries.dtype());
}

constexpr int B = 2, H = 4, Hkv = 2, S = 150, D = 64;

struct AttentionOperation : testing::TestWithParam<int> {
  int L = GetParam();
  mx::array queries = normal({B, H, L, D}, 1);
  mx::array keys = normal({B, Hkv, S + 5, D}, 2);
  mx::array values = normal({B, Hkv, S + 5, 32}, 3);
  AttentionParams params{.scale = 0.2f, .mask = Causal{}, .sinks = {}, .row_starts = {}};
};

INSTANTIATE_TEST_SUITE_P(Queries, AttentionOperation, testing::Values(1, 3, 40));

TEST_P(AttentionOperation, IsOneOperationOverViewsOfTheBuffer) {
  const DenseKV stored{view(keys, S), view(values, S)};
  const mx::array out = attention(queries, stored, params);
  ASSERT_TRUE(out.has_primitive());
  EXPECT_EQ(std::string_view(out.primitive().name()), "Attention");
  expect_near(out, reference_of(queries, stored, params));
}

TEST_P(AttentionOperation, QueriesInAnyLayoutAndDtype) {
  const DenseKV stored{view(keys, S), view(values, S)};
  for (const auto& [dtype, tolerance] :
       {std::pair(mx::float32, 2e-5), std::pair(mx::float16, 1e-3), std::pair(mx::bfloat16, 8e-3)}) {
    const mx::array typed = mx::astype(queries, dtype);
    const mx::array by_tokens = mx::contiguous(mx::transpose(typed, {0, 2, 1, 3}));
    const mx::array by_features = mx::contiguous(mx::transpose(typed, {0, 1, 3, 2}));
    for (const mx::array& q :
         {typed, mx::transpose(by_tokens, {0, 2, 1, 3}), mx::transpose(by_features, {0, 1, 3, 2})}) {
      expect_near(attention(q, stored, params), reference_of(typed, stored, params), tolerance);
    }
  }
}

TEST_P(AttentionOperation, KeysAndValuesOfAnyDtype) {
  for (const mx::Dtype key : {mx::float16, mx::bfloat16}) {
    for (const mx::Dtype value : {mx::float16, mx::bfloat16, mx::float32}) {
      const DenseKV stored{view(mx::astype(keys, key), S), view(mx::astype(values, value), S)};
      expect_near(attention(queries, stored, params), reference_of(queries, stored, params));
    }
  }
}

TEST_P(AttentionOperation, KeysAndValuesInAnyLayout) {
  const auto by_columns = [](const mx::array& x) {
    return mx::transpose(mx::contiguous(mx::transpose(x, {0, 1, 3, 2})), {0, 1, 3, 2});
  };
  const auto by_tokens = [](const mx::array& x) {
    return mx::transpose(mx::contiguous(mx::transpose(x, {0, 2, 1, 3})), {0, 2, 1, 3});
  };
  for (const mx::Dtype dtype : {mx::float32, mx::float16}) {
    const DenseKV stored{view(mx::astype(keys, dtype), S), view(mx::astype(values, dtype), S)};
    const auto want = reference_of(queries, stored, params);
    expect_near(attention(queries, DenseKV{by_columns(stored.keys), by_columns(stored.values)}, params), want);
    expect_near(attention(queries, DenseKV{by_tokens(stored.keys), by_columns(stored.values)}, params), want);
    const DenseKV first{view(mx::slice(keys, {0, 0, 0, 0}, {1, Hkv, S + 5, D}), S),
                        view(mx::slice(values, {0, 0, 0, 0}, {1, Hkv, S + 5, 32}), S)};
    const DenseKV broadcast{mx::broadcast_to(first.keys, {B, Hkv, S, D}),
                            mx::broadcast_to(first.values, {B, Hkv, S, 32})};
    expect_near(attention(queries, broadcast, params), reference_of(queries, broadcast, params));
  }
}

TEST_P(AttentionOperation, QuantisedRowsInAnyLayoutAndDtype) {
  for (const int bits : {4, 8, 3}) {
    for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      const KVQuantization quantization{32, bits};
      QuantizedKV stored{quantized(mx::astype(keys, dtype), quantization),
                         quantized(mx::astype(values, dtype), quantization), quantization};
      for (QuantizedTensor* tensor : {&stored.keys, &stored.values}) {
        *tensor = {view(tensor->packed, S), view(tensor->scales, S), view(tensor->biases, S)};
      }
      const auto want = reference_of(queries, stored, params);
      expect_near(attention(queries, stored, params), want, 5e-5);
      stored.keys.biases = mx::contiguous(stored.keys.biases);
      stored.values.packed =
          mx::transpose(mx::contiguous(mx::transpose(stored.values.packed, {0, 3, 2, 1})), {0, 3, 2, 1});
      stored.values.scales = in_float32(stored.values.scales);
      expect_near(attention(queries, stored, params), want, 5e-5);
    }
  }
}

TEST_P(AttentionOperation, MasksOfAnyShapeAndDtype) {
  const DenseKV stored{view(keys, S), view(values, S)};
  for (const mx::Shape& shape : {mx::Shape{S}, mx::Shape{L, S}, mx::Shape{H, 1, S}, mx::Shape{B, 1, L, S},
                                 mx::Shape{B, H, L, S}, mx::Shape{L, 1}, mx::Shape{}}) {
    const mx::array additive = mx::multiply(normal(shape, 7), mx::array(3.0f));
    for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      params.mask = mx::astype(additive, dtype);
      expect_near(attention(queries, stored, params), reference_of(queries, stored, params), 5e-5);
    }
    params.mask = mx::greater(additive, mx::array(-2.0f));
    expect_near(attention(queries, stored, params), reference_of(queries, stored, params));
    if (shape.size() == 2 && shape[1] == S) {
      params.mask = mx::swapaxes(mx::contiguous(mx::swapaxes(std::get<mx::array>(params.mask), 0, 1)), 0, 1);
      expect_near(attention(queries, stored, params), reference_of(queries, stored, params));
    }
  }
}

TEST_P(AttentionOperation, SinksOfAnyDtype) {
  const DenseKV stored{view(keys, S), view(values, S)};
  for (const mx::Dtype dtype : {mx::float32, mx::float16}) {
    params.sinks = mx::slice(mx::astype(normal({2 * H}, 9), dtype), {0}, {2 * H}, {2});
    expect_near(attention(queries, stored, params), reference_of(queries, stored, params));
  }
}

TEST_P(AttentionOperation, SoftCapsOverDenseAndQuantisedRows) {
  params.softcap = 3.0f;
  const DenseKV dense{view(keys, S), view(values, S)};
  const mx::array plain = reference_of(queries, dense, {.scale = 0.2f, .mask = Causal{}});
  for (const bool with_sinks : {false, true}) {
    if (with_sinks) params.sinks = normal({H}, 9);
    const auto want = reference_of(queries, dense, params);
    EXPECT_FALSE(mx::allclose(want, plain, 1e-2, 1e-2).item<bool>());
    expect_near(attention(queries, dense, params), want);
    const KVQuantization quantization{32, 8};
    QuantizedKV stored{quantized(keys, quantization), quantized(values, quantization), quantization};
    for (QuantizedTensor* tensor : {&stored.keys, &stored.values}) {
      *tensor = {view(tensor->packed, S), view(tensor->scales, S), view(tensor->biases, S)};
    }
    expect_near(attention(queries, stored, params), reference_of(queries, stored, params), 5e-5);
  }
  params = {.scale = 0.2f, .mask = mx::greater(normal({L, S}, 7), mx::array(-0.5f)), .softcap = 1e6f};
  expect_near(reference_of(queries, dense, params), reference_of(queries, dense, {.scale = 0.2f, .mask = params.mask}));
}

TEST_P(AttentionOperation, ColumnsBeforeRowStartsAreNotRead) {
  const std::vector<int> starts = {0, 100};
  const mx::array at(starts.begin(), {B}, mx::int32);
  const mx::array sees = mx::greater_equal(mx::arange(0, S), mx::reshape(at, {B, 1, 1, 1}));
  params.mask = sees;
  const DenseKV stored{view(keys, S), view(values, S)};
  const auto want = reference_of(queries, stored, params);
  const mx::array nan(std::nanf(""));
  const mx::array shown = mx::reshape(sees, {B, 1, S, 1});
  const DenseKV damaged{mx::where(shown, stored.keys, nan), mx::where(shown, stored.values, nan)};
  params.row_starts = at;
  expect_near(attention(queries, damaged, params), want);
}

TEST_P(AttentionOperation, ItsTimeIsTold) {
  Profile::reset();
  Profile::enable(true);
  mx::eval(attention(queries, DenseKV{view(keys, S), view(values, S)}, params));
  Profile::enable(false);
  ASSERT_EQ(Profile::entries().size(), 1u);
  EXPECT_EQ(Profile::entries()[0].operation, "attention");
}

}  // namespace
}  // namespace reprise::kernels
