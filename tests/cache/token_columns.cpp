#include "tests/cache/token_columns.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

const mx::array& first_tensor(const KeysValues& seen) {
  if (const auto* dense = std::get_if<DenseKV>(&seen)) return dense->keys;
  return std::get<QuantizedKV>(seen).keys.packed;
}

std::vector<std::vector<float>> last_features(const KeysValues& seen, bool values) {
  mx::array x(0.0f);
  const int num_rows = first_tensor(seen).shape(0);
  if (first_tensor(seen).shape(2) == 0) return std::vector<std::vector<float>>(static_cast<std::size_t>(num_rows));
  if (const auto* dense = std::get_if<DenseKV>(&seen)) {
    x = values ? dense->values : dense->keys;
  } else {
    const auto& quantized = std::get<QuantizedKV>(seen);
    const QuantizedTensor& triple = values ? quantized.values : quantized.keys;
    x = mx::dequantize(triple.packed, triple.scales, triple.biases, quantized.quantization.group_size,
                       quantized.quantization.bits);
  }
  x = mx::contiguous(mx::slice(x, {0, 0, 0, x.shape(3) - 1}, x.shape()));
  x.eval();
  std::vector<std::vector<float>> rows;
  const int width = x.shape(2);
  for (int b = 0; b < x.shape(0); ++b) {
    rows.emplace_back(x.data<float>() + b * width, x.data<float>() + (b + 1) * width);
  }
  return rows;
}

}  // namespace

mx::array token_columns(const std::vector<std::vector<int>>& rows, int width, int size, float sign) {
  std::vector<float> data;
  for (const auto& row : rows) {
    for (int t = 0; t < width; ++t) {
      const float value =
          t < static_cast<int>(row.size()) ? sign * static_cast<float>(row[static_cast<std::size_t>(t)]) : 0.0f;
      data.insert(data.end(), static_cast<std::size_t>(size), value);
    }
  }
  return mx::array(data.begin(), mx::Shape{static_cast<int>(rows.size()), 1, width, size}, mx::float32);
}

std::vector<std::vector<float>> shown_keys(const KeysValues& seen) { return last_features(seen, false); }
std::vector<std::vector<float>> shown_values(const KeysValues& seen) { return last_features(seen, true); }

std::function<bool(int, int, int)> visibility(const Mask& mask, int N, int width) {
  if (std::holds_alternative<NoMask>(mask)) return [](int, int, int) { return true; };
  if (std::holds_alternative<Causal>(mask)) return [=](int, int i, int c) { return c <= width - N + i; };
  mx::array dense = mx::contiguous(std::get<mx::array>(mask));
  dense.eval();
  EXPECT_EQ(dense.dtype(), mx::bool_);
  EXPECT_EQ(dense.shape(-1), width);
  if (dense.shape(-1) != width) return [](int, int, int) { return false; };
  const int rows = dense.ndim() == 4 ? dense.shape(0) : 1;
  return [=](int b, int i, int c) { return dense.data<bool>()[((rows > 1 ? b : 0) * N + i) * width + c]; };
}

}  // namespace reprise::cache_test
