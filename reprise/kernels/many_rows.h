// Products of many rows with a weight matrix, bound by arithmetic: a panel of weights is unpacked once and multiplied
// with all rows. See products.h for the two steps. Private to `kernels`.
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::many_rows {

std::size_t prepared_bytes(const InputForm& form, int num_rows);
void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared);
void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo);

}  // namespace reprise::kernels::cpu::many_rows
