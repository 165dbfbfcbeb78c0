// Products of one to eight rows with a weight matrix, where reading weights takes most of the time: each is read once
// and unpacked in registers. Of two or more rows, each one's results are the same as without the others. See products.h
// for the two steps. Private to `kernels`.
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::few_rows {

inline constexpr int kMaxRows = 8;

std::size_t prepared_bytes(const InputForm& form, int num_rows);
void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared);
void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo);

}  // namespace reprise::kernels::cpu::few_rows
