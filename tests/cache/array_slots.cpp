#include "tests/cache/array_slots.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

mx::array slot(const std::vector<int>& rows, mx::Dtype dtype) {
  std::vector<mx::array> parts;
  for (const int row : rows) parts.push_back(mx::full({1, 2, 3}, static_cast<float>(row), dtype));
  return mx::concatenate(std::move(parts), 0);
}

Counts rows_in(const ArraysCache& cache, int index) {
  const auto array = cache.get(index);
  if (!array) return std::nullopt;
  std::vector<int> rows;
  for (int row = 0; row < array->shape(0); ++row) {
    mx::array part = mx::slice(*array, {row, 0, 0}, {row + 1, 2, 3});
    EXPECT_TRUE(mx::array_equal(part, mx::broadcast_to(mx::max(part), part.shape())).item<bool>());
    rows.push_back(mx::astype(mx::max(part), mx::int32).item<int>());
  }
  return rows;
}

std::vector<std::vector<bool>> mask_of(const ArraysCache& cache, int N) {
  const Mask mask = cache.make_mask(N);
  mx::array array = mx::contiguous(std::get<mx::array>(mask));
  EXPECT_EQ(array.dtype(), mx::bool_);
  std::vector<std::vector<bool>> rows;
  array.eval();
  for (int b = 0; b < array.shape(0); ++b)
    rows.emplace_back(array.data<bool>() + b * N, array.data<bool>() + (b + 1) * N);
  return rows;
}

}  // namespace reprise::cache_test
