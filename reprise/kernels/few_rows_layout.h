// How few_rows lays prepared rows out in memory. Private to `kernels`.
//
// Quantised weights are multiplied 4 or 8 bits wide; other widths are unpacked to bytes first. A block is what one
// vector of such weights holds. Rows are quantised to 16 bits in each group and spread as the weights are unpacked:
//   one row      as products of bytes, where the instruction set has those that add up without loss: first the rows'
//                upper bytes (of 4 bits: those of even, then of odd values), then the lower ones;
//   else         as products of 16 bits. A 16-bit lane holds `parts` values; part j has value lane · parts + j.
// In memory: [blocks][num_rows][parts][vector], zeros past the last; then of each row the groups' scales, begun again
// after the last so that a vector can be read from any of them; then of each row the groups' sums, zeros past the last.
//
// Dense weights: float rows with zeros past the last, [num_rows][cols, rounded up to kDenseMultiple].
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::few_rows {

// Sizes hold for vectors of up to this many bytes: shorter ones never need more.
inline constexpr std::size_t kMaxVectorBytes = 64;
inline constexpr std::size_t kMaxLanes = kMaxVectorBytes / sizeof(float);
inline constexpr std::size_t kDenseMultiple = kMaxLanes;

constexpr std::size_t divide_up(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }
constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return divide_up(value, multiple) * multiple;
}

// The width in which weights are multiplied.
constexpr int width_of(int bits) { return bits == 4 ? 4 : 8; }

struct Layout {
  std::size_t cols = 0;
  std::size_t group_size = 0;
  std::size_t groups = 0;
  std::size_t values = 0;         // in a block
  std::size_t blocks = 0;         // the last may be in part
  std::size_t row_bytes = 0;      // of one row in one block
  std::size_t block_bytes = 0;    // of all rows in one block
  std::size_t scales_stride = 0;  // floats
  std::size_t scales_offset = 0;  // bytes
  std::size_t sums_stride = 0;
  std::size_t sums_offset = 0;
  std::size_t bytes = 0;

  Layout(const InputForm& form, int num_rows, std::size_t vector_bytes)
      : cols(static_cast<std::size_t>(form.cols)), group_size(static_cast<std::size_t>(form.group_size)) {
    const auto rows = static_cast<std::size_t>(num_rows);
    if (form.bits == 0) {
      row_bytes = round_up(cols, kDenseMultiple) * sizeof(float);
      bytes = rows * row_bytes;
      return;
    }
    const auto width = static_cast<std::size_t>(width_of(form.bits));
    groups = cols / group_size;
    values = vector_bytes * 8 / width;
    blocks = divide_up(cols, values);
    row_bytes = 16 / width * vector_bytes;
    block_bytes = rows * row_bytes;
    scales_stride = round_up(groups + kMaxLanes, kMaxLanes);
    scales_offset = round_up(blocks * block_bytes, kMaxVectorBytes);
    sums_stride = round_up(groups, kMaxLanes);
    sums_offset = scales_offset + rows * scales_stride * sizeof(float);
    bytes = sums_offset + rows * sums_stride * sizeof(float);
  }
};

}  // namespace reprise::kernels::cpu::few_rows
