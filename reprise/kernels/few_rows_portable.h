// few_rows without vectors, for processors that have none of those that we compile for. Private to `kernels`.
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::few_rows::portable {

// Rows stay floats.
constexpr std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return static_cast<std::size_t>(form.cols) * static_cast<std::size_t>(num_rows) * sizeof(float);
}

void prepare(const InputForm& form, const float* x, std::size_t ldx, int begin, int end, void* prepared);
void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo);

}  // namespace reprise::kernels::cpu::few_rows::portable
