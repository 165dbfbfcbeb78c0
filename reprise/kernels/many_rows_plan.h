// What the instruction sets' versions of many_rows share: where prepared rows lie, how products are cut for the caches,
// scratch memory. Private to many_rows.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu::many_rows {

// Prepared rows for quantised weights: x = scale · int16 within each group of the weight.
struct Int16Rows {
  std::int32_t* pairs = nullptr;  // [rows, pairs_per_row]: two int16 each
  std::size_t pairs_per_row = 0;
  float* scales = nullptr;  // [rows, groups]; NaN for a group that is not finite
  float* sums = nullptr;    // [rows, groups]: of the numbers as they became
  std::size_t groups = 0;

  static std::size_t bytes(const InputForm& form, int num_rows);
  Int16Rows(const InputForm& form, int num_rows, void* prepared);
};

// Numbers along k in one panel: with the widest vectors it takes 32 KiB, which stays in the first cache.
inline constexpr std::size_t kPanelDepth = 512;

// Rows at once: so many that they stay in the second cache while the panels pass, in even parts.
inline std::size_t row_block(std::size_t num_rows, std::size_t row_bytes) {
  constexpr std::size_t kCacheShare = std::size_t{512} << 10;
  constexpr std::size_t kLeast = 64;  // or panels are unpacked too often
  const std::size_t most = std::max(kLeast, kCacheShare / row_bytes);
  const std::size_t blocks = (num_rows + most - 1) / most;
  return (num_rows + blocks - 1) / blocks;
}

// One thread's memory for the time of a product, aligned to 64 bytes; a thread keeps it for the next.
class Scratch {
 public:
  explicit Scratch(std::size_t floats);  // in all. Throws: bad_alloc
  float* take(std::size_t floats);       // a multiple of 16

 private:
  float* next_;
};

}  // namespace reprise::kernels::cpu::many_rows
