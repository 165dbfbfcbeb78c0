// The CPU kernels' own vocabulary: pointers and sizes, no MLX. Private to `kernels`. Each kernel is compiled for
// several instruction sets (Highway) and the best is chosen at run time. Results do not depend on the number of
// threads: work is cut by shapes alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reprise::kernels::cpu {

// e8m0: powers of two, as scales alone; the weight's values then are e2m1 (see below).
enum class Element : std::uint8_t { f32, f16, bf16, e8m0 };

// Columns of a page, where keys and values are stored in pages.
inline constexpr int kPageColumns = 64;

inline std::size_t size_of(Element element) { return element == Element::f32 ? 4 : element == Element::e8m0 ? 1 : 2; }

// A matrix [rows, cols] = [out, in], row-contiguous, as MLX stores it.
struct WeightView {
  int rows = 0;
  int cols = 0;
  int bits = 0;  // 0: dense
  int group_size = 0;
  Element element = Element::f32;  // of a dense matrix, or of scales and biases
  const void* data = nullptr;      // dense elements, or uint32 [rows, cols * bits / 32]
  const void* scales = nullptr;    // [rows, cols / group_size]
  const void* biases = nullptr;    // null with e8m0 scales
  bool centred = false;            // each bias is -2^(bits - 1) times its scale
};

// MXFP4's values, of which all sixteen are halves: products take them doubled and raised to begin at zero, as if they
// were quantised by scale / 2 with a bias of -kE2m1Zero times that.
inline constexpr std::uint8_t kE2m1Raised[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
inline constexpr float kE2m1Zero = 12.0F;
inline bool is_e2m1(const WeightView& weight) { return weight.bits != 0 && weight.element == Element::e8m0; }

// `count` of its rows.
inline WeightView rows_of(const WeightView& weight, std::size_t first, int count) {
  const auto at = [&](const void* data, std::size_t row_bytes) {
    return data != nullptr ? static_cast<const std::byte*>(data) + first * row_bytes : nullptr;
  };
  const auto cols = static_cast<std::size_t>(weight.cols);
  const std::size_t element = size_of(weight.element);
  WeightView rows = weight;
  rows.rows = count;
  rows.data = at(weight.data, weight.bits == 0 ? cols * element : cols / 8 * static_cast<std::size_t>(weight.bits));
  if (weight.bits == 0) return rows;
  const std::size_t groups = cols / static_cast<std::size_t>(weight.group_size);
  rows.scales = at(weight.scales, groups * element);
  rows.biases = at(weight.biases, groups * element);
  return rows;
}

}  // namespace reprise::kernels::cpu
