#include "reprise/kernels/many_rows.h"

#include <algorithm>
#include <vector>

namespace reprise::kernels::cpu::many_rows {

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return (static_cast<std::size_t>(form.cols) * static_cast<std::size_t>(num_rows) * sizeof(float) + 63) / 64 * 64;
}

void prepare(const InputForm& form, int /*num_rows*/, const float* x, std::size_t ldx, int begin, int end,
             void* prepared) {
  const auto cols = static_cast<std::size_t>(form.cols);
  for (auto m = static_cast<std::size_t>(begin); m < static_cast<std::size_t>(end); ++m) {
    std::copy_n(x + m * ldx, cols, static_cast<float*>(prepared) + m * cols);
  }
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  const auto cols = static_cast<std::size_t>(weight.cols);
  std::vector<float> column(cols);
  for (int n = begin; n < end; ++n) {
    unpack_row(weight, n, column.data());
    for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
      const float* row = static_cast<const float*>(prepared) + m * cols;
      float sum = 0;
      for (std::size_t k = 0; k < cols; ++k) sum += row[k] * column[k];
      out[m * ldo + static_cast<std::size_t>(n - begin)] = sum;
    }
  }
}

}  // namespace reprise::kernels::cpu::many_rows
