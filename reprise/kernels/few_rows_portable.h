// few_rows without vectors, for processors that have none, or only very old ones. Private to `kernels`.
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

// Whether the instruction set whose turn it is (hwy/foreach_target.h) has no vectors worth using.
#define REPRISE_FEW_ROWS_PORTABLE (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SSSE3)

namespace reprise::kernels::cpu::few_rows::portable {

// Rows stay floats.
constexpr std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return static_cast<std::size_t>(form.cols) * static_cast<std::size_t>(num_rows) * sizeof(float);
}

void prepare(const InputForm& form, const float* x, std::size_t ldx, int begin, int end, void* prepared);
void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo);

}  // namespace reprise::kernels::cpu::few_rows::portable
