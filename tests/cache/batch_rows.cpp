#include "tests/cache/batch_rows.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "mlx/ops.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

std::size_t longest(const TokenRows& tokens) {
  std::size_t most = 0;
  for (const auto& row : tokens) most = std::max(most, row.size());
  return most;
}

mx::array one_row(const mx::array& x, int row) {
  mx::Shape start(x.ndim(), 0), stop = x.shape();
  start[0] = row;
  stop[0] = row + 1;
  return mx::slice(x, start, stop);
}

mx::array dense_row(const QuantizedTensor& tensor, const KVQuantization& quantization, int row) {
  const mx::array scales = one_row(tensor.scales, row);
  if (scales.size() == 0) {
    mx::Shape shape = scales.shape();
    shape.back() *= quantization.group_size;
    return mx::zeros(shape, scales.dtype());
  }
  return mx::dequantize(one_row(tensor.packed, row), scales, one_row(tensor.biases, row), quantization.group_size,
                        quantization.bits);
}

}  // namespace

Rows batch_rows(const TokenRows& tokens, const RowShape& shape, int columns) {
  if (tokens.empty()) {
    return {mx::zeros({0, shape.heads, columns, shape.key_size}, shape.dtype),
            mx::zeros({0, shape.heads, columns, shape.value_size}, shape.dtype)};
  }
  std::vector<mx::array> keys, values;
  for (const auto& row : tokens) {
    Rows one = rows(row, shape);
    keys.push_back(one.keys);
    values.push_back(one.values);
  }
  return {mx::concatenate(keys, 0), mx::concatenate(values, 0)};
}

KeysValues append_batch(AttentionCache& cache, const TokenRows& tokens, const RowShape& shape) {
  const Rows added = batch_rows(tokens, shape);
  return cache.update_and_fetch(added.keys, added.values);
}

TokenRows left_padded(const TokenRows& tokens) {
  TokenRows result = tokens;
  for (auto& row : result) row.insert(row.begin(), longest(tokens) - row.size(), kFiller);
  return result;
}

TokenRows right_padded(const TokenRows& tokens) {
  TokenRows result = tokens;
  for (auto& row : result) row.resize(longest(tokens), kFiller);
  return result;
}

std::vector<int> paddings(const TokenRows& tokens) {
  std::vector<int> result;
  for (const auto& row : tokens) result.push_back(static_cast<int>(longest(tokens) - row.size()));
  return result;
}

DenseKV row_of(const KeysValues& keys_values, int row, int begin) {
  const auto from_begin = [&](const mx::array& x) { return mx::slice(x, {0, 0, begin, 0}, x.shape()); };
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) {
    return {from_begin(one_row(dense->keys, row)), from_begin(one_row(dense->values, row))};
  }
  const auto& quantized = std::get<QuantizedKV>(keys_values);
  return {from_begin(dense_row(quantized.keys, quantized.quantization, row)),
          from_begin(dense_row(quantized.values, quantized.quantization, row))};
}

void expect_holds(const internal::BatchGrowingCache& cache, const TokenRows& tokens) {
  ASSERT_EQ(cache.batch_size(), static_cast<int>(tokens.size()));
  EXPECT_EQ(cache.length(), cache.idx());
  EXPECT_EQ(cache.size(), cache.idx());
  EXPECT_EQ(cache.max_trim(), cache.idx());
  EXPECT_TRUE(cache.is_trimmable());
  EXPECT_FALSE(cache.position().has_value());

  std::vector<int> lengths;
  for (const auto& row : tokens) lengths.push_back(static_cast<int>(row.size()));
  EXPECT_EQ(cache.positions(), lengths);
  if (!tokens.empty()) {
    const mx::array expected(lengths.begin(), mx::Shape{static_cast<mx::ShapeElem>(lengths.size())}, mx::int32);
    EXPECT_TRUE(identical(std::get<mx::array>(cache.offset()), expected));
  }
  if (cache.empty()) {
    EXPECT_EQ(longest(tokens), 0u);
    return;
  }
  const KeysValues all = cache.keys_and_values();
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    const int begin = cache.left_padding()[row];
    ASSERT_EQ(begin, cache.idx() - lengths[row]);
    EXPECT_EQ(tokens_of(KeysValues(row_of(all, static_cast<int>(row), begin))), tokens[row]) << row;
  }
}

void expect_mask(const internal::BatchGrowingCache& cache, int N, std::optional<int> window) {
  mx::array mask = std::get<mx::array>(cache.make_mask(N, {.window = window}));
  const int columns = cache.idx() + N, batch = cache.batch_size();
  ASSERT_EQ(mask.shape(), (mx::Shape{batch, 1, N, columns}));
  ASSERT_EQ(mask.dtype(), mx::bool_);
  mask = mx::contiguous(mask);
  mask.eval();
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < N; ++i) {
      for (int k = 0; k < columns; ++k) {
        const int query = cache.idx() + i;
        const bool seen =
            k <= query && k >= cache.left_padding()[static_cast<std::size_t>(b)] && (!window || k > query - *window);
        ASSERT_EQ(mask.data<bool>()[(b * N + i) * columns + k], seen) << b << " " << i << " " << k;
      }
    }
  }
}

}  // namespace reprise::cache_test
