#include "reprise/kernels/few_rows_portable.h"

#include <algorithm>

#include "reprise/kernels/scratch.h"

namespace reprise::kernels::cpu::few_rows::portable {
namespace {

float dot(const float* a, const float* b, std::size_t size) {
  // As many sums as the smallest vectors hold, so that a compiler can use them.
  constexpr std::size_t kSums = 8;
  float sums[kSums] = {};
  std::size_t k = 0;
  for (; k + kSums <= size; k += kSums)
    for (std::size_t i = 0; i < kSums; ++i) sums[i] += a[k + i] * b[k + i];
  float sum = 0;
  for (const float part : sums) sum += part;
  for (; k < size; ++k) sum += a[k] * b[k];
  return sum;
}

}  // namespace

void prepare(const InputForm& form, const float* x, std::size_t ldx, int begin, int end, void* prepared) {
  const auto cols = static_cast<std::size_t>(form.cols);
  for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row)
    std::copy_n(x + row * ldx, cols, static_cast<float*>(prepared) + row * cols);
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  const auto cols = static_cast<std::size_t>(weight.cols);
  auto* column = static_cast<float*>(scratch(cols * sizeof(float)));
  for (int n = begin; n < end; ++n) {
    unpack_row(weight, n, column);
    for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m)
      out[m * ldo + static_cast<std::size_t>(n - begin)] =
          dot(static_cast<const float*>(prepared) + m * cols, column, cols);
  }
}

}  // namespace reprise::kernels::cpu::few_rows::portable
