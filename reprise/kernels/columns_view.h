// Columns of sequences by pointers and strides, no MLX. Private to `kernels`.
#pragma once

#include <cstddef>

namespace reprise::kernels::cpu {

// Floats [B, L, size], features beside each other. Null data: there are none.
struct ColumnsView {
  const float* data = nullptr;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t column_stride = 0;

  const float* at(int row, int column) const { return data + row * row_stride + column * column_stride; }
};

}  // namespace reprise::kernels::cpu
