// Numbers of GGUF blocks: float16 without hardware for it, streams of narrow numbers. Private to storage.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace reprise::internal {

inline std::uint16_t load_half(const std::byte* from) {
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

inline std::uint64_t load_u64(const std::byte* from) {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 31u;
  const std::uint32_t fraction = half & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Rounded to nearest, ties to even; an infinity from 65520 on. NaN stays one.
inline std::uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which the addition rounds to
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t even = (magnitude >> 13) & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + even) >> 13));
}

// `count` numbers below 2^bits, a multiple of eight, as a stream of bits: each eight fill `bits` bytes. Returns: the
// end of what it wrote.
inline unsigned char* pack_bits(const std::uint8_t* numbers, int count, int bits, unsigned char* out) {
  for (int i = 0; i < count; i += 8, out += bits) {
    std::uint64_t stream = 0;
    for (int k = 0; k < 8; ++k) stream |= std::uint64_t{numbers[i + k]} << (bits * k);
    for (int k = 0; k < bits; ++k) out[k] = static_cast<unsigned char>(stream >> (8 * k));
  }
  return out;
}

}  // namespace reprise::internal
