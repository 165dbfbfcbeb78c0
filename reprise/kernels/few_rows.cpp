#include "reprise/kernels/few_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace reprise::kernels::cpu::few_rows {

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  const std::size_t bytes = static_cast<std::size_t>(form.cols) * static_cast<std::size_t>(num_rows) * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

void prepare(const InputForm& form, int /*num_rows*/, const float* x, std::size_t ldx, int begin, int end,
             void* prepared) {
  const auto cols = static_cast<std::size_t>(form.cols);
  for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row)
    std::memcpy(static_cast<float*>(prepared) + row * cols, x + row * ldx, cols * sizeof(float));
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  const auto cols = static_cast<std::size_t>(weight.cols);
  std::vector<float> row(cols);
  for (int n = begin; n < end; ++n) {
    unpack_row(weight, n, row.data());
    for (int m = 0; m < num_rows; ++m) {
      const float* x = static_cast<const float*>(prepared) + static_cast<std::size_t>(m) * cols;
      float sum = 0;
      for (std::size_t k = 0; k < cols; ++k) sum += row[k] * x[k];
      out[static_cast<std::size_t>(m) * ldo + static_cast<std::size_t>(n - begin)] = sum;
    }
  }
}

}  // namespace reprise::kernels::cpu::few_rows
