// Single elements of stored weights, portable: for look-ups of rows and for tails. Private to `kernels`.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

inline float float_of_f16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t rest = half & 0x7fffU;
  if (rest >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13));
  if (rest >= 0x0400U) return std::bit_cast<float>(sign | ((rest << 13) + (112U << 23)));
  const float magnitude = static_cast<float>(rest) * 0x1p-24F;
  return sign != 0 ? -magnitude : magnitude;
}

inline float float_of_bf16(std::uint16_t brain) { return std::bit_cast<float>(std::uint32_t{brain} << 16); }

// Element `index` of an array that may lie at any address.
inline float element_at(Element element, const void* data, std::size_t index) {
  const auto* bytes = static_cast<const std::uint8_t*>(data) + index * size_of(element);
  if (element == Element::e8m0) return std::bit_cast<float>(std::uint32_t{*bytes} << 23);
  if (element == Element::f32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  std::uint16_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return element == Element::f16 ? float_of_f16(value) : float_of_bf16(value);
}

// Value `index` of a packed row: all widths are a little-endian stream of bits. Reads only bytes that hold the value.
inline std::uint32_t packed_at(const std::uint8_t* row, int bits, std::size_t index) {
  const std::size_t bit = index * static_cast<std::size_t>(bits);
  const auto shift = static_cast<int>(bit % 8);
  std::uint32_t window = row[bit / 8];
  if (shift + bits > 8) window |= std::uint32_t{row[bit / 8 + 1]} << 8;
  return (window >> shift) & ((1U << bits) - 1);
}

}  // namespace reprise::kernels::cpu
