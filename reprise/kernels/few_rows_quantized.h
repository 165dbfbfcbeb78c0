// multiply of few_rows.h for quantised weights: a file of its own because it takes long to compile. Private to
// `kernels`.
#pragma once

#include <cstddef>

#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu::few_rows {

void multiply_quantized(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
                        std::size_t ldo);

}  // namespace reprise::kernels::cpu::few_rows
