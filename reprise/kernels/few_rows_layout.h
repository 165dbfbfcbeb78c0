// How few_rows lays prepared rows out in memory. Private to `kernels`.
//
// Packed weights: a vector of a packed row, taken as 16-bit lanes, holds 16 / bits values in each lane; (v >> bits·j) &
// mask is part j, with value lane · parts + j in each lane. Rows are prepared to match: block after block (a block is
// what one vector of packed weights holds), row after row within a block,
//   int16 x[parts][lanes16]   the quantised inputs, zeros past the last
//   float scales[lanes32]     of the group that each 32-bit lane belongs to
// and behind all blocks the groups' sums, [num_rows][groups, rounded up to kSumsMultiple] floats, zeros past the last.
// Bits of 3, 5 and 6 are unpacked to bytes first and go on as 8.
//
// Dense weights: float rows with zeros past the last, [num_rows][cols, rounded up to kDenseMultiple].
#pragma once

#include <cstddef>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::few_rows {

// Sizes hold for vectors of up to this many bytes: shorter ones never need more.
inline constexpr std::size_t kMaxVectorBytes = 64;
inline constexpr std::size_t kSumsMultiple = 16;
inline constexpr std::size_t kDenseMultiple = 16;

constexpr std::size_t divide_up(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }
constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return divide_up(value, multiple) * multiple;
}

// The width in which values are multiplied.
constexpr std::size_t lane_bits(int bits) { return bits == 2 || bits == 4 ? static_cast<std::size_t>(bits) : 8; }

struct Layout {
  std::size_t cols = 0;
  std::size_t group_size = 0;
  std::size_t groups = 0;
  std::size_t values = 0;       // in a block
  std::size_t blocks = 0;       // the last may be in part
  std::size_t row_bytes = 0;    // of one row in one block
  std::size_t block_bytes = 0;  // of all rows in one block
  std::size_t sums_stride = 0;  // floats
  std::size_t sums_offset = 0;  // bytes
  std::size_t bytes = 0;

  Layout(const InputForm& form, int num_rows, std::size_t vector_bytes)
      : cols(static_cast<std::size_t>(form.cols)), group_size(static_cast<std::size_t>(form.group_size)) {
    const auto rows = static_cast<std::size_t>(num_rows);
    if (form.bits == 0) {
      row_bytes = round_up(cols, kDenseMultiple) * sizeof(float);
      bytes = round_up(rows * row_bytes, kMaxVectorBytes);
      return;
    }
    const std::size_t bits = lane_bits(form.bits);
    groups = cols / group_size;
    values = vector_bytes * 8 / bits;
    blocks = divide_up(cols, values);
    row_bytes = (16 / bits + 1) * vector_bytes;
    block_bytes = rows * row_bytes;
    sums_stride = round_up(groups, kSumsMultiple);
    sums_offset = round_up(blocks * block_bytes, kMaxVectorBytes);
    bytes = round_up(sums_offset + rows * sums_stride * sizeof(float), kMaxVectorBytes);
  }
};

}  // namespace reprise::kernels::cpu::few_rows
