#include "reprise/kernels/rows_cpu.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

// Compiled without contraction of products and sums: fused ones round otherwise than MLX's.
namespace reprise::kernels::cpu {

namespace {

constexpr float kLargestHalf = 65504.0f;

inline std::uint16_t to_half(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const float size = std::min(std::abs(x), kLargestHalf);  // NaN stays what it is only in `x`
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(size);
  // Adding 1/2 brings the numbers below 2^-14 to float16's smallest step, rounded.
  const std::uint32_t small = std::bit_cast<std::uint32_t>(size + 0.5f) - std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t rounded = size < 0x1p-14f ? small : normal;
  return static_cast<std::uint16_t>(sign | (x != x ? 0x7e00u : rounded));
}

inline float from_half(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  // Scaling by 2^112 sets the exponent's bias right, subnormal numbers included; infinities and NaN keep all ones.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(scaled) | (magnitude >= 0x7c00u ? 0x7f800000u : 0u);
  return std::bit_cast<float>(sign | bits);
}

inline std::uint16_t to_bfloat(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bfloat(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

// To the nearest integer, even on a tie, in the default rounding mode. Requires: |x| < 2^22.
inline float nearest(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23
  return (x + kMagic) - kMagic;
}

// `count` numbers below 2^bits as a little-endian string of bits, a whole number of bytes.
void pack(const std::uint8_t* q, int count, int bits, std::uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, q, static_cast<std::size_t>(count));
    return;
  }
  if (bits == 4) {
    for (int i = 0; i < count / 2; ++i) out[i] = static_cast<std::uint8_t>(q[2 * i] | q[2 * i + 1] << 4);
    return;
  }
  std::uint32_t held = 0;
  int held_bits = 0;
  for (int i = 0; i < count; ++i) {
    held |= std::uint32_t{q[i]} << held_bits;
    for (held_bits += bits; held_bits >= 8; held_bits -= 8, held >>= 8) *out++ = static_cast<std::uint8_t>(held);
  }
}

}  // namespace

void load_row(const void* data, Element element, std::ptrdiff_t stride, int size, float* out) {
  if (element == Element::f32) {
    const auto* x = static_cast<const float*>(data);
    if (stride == 1) {
      std::copy(x, x + size, out);
    } else {
      for (int i = 0; i < size; ++i) out[i] = x[i * stride];
    }
    return;
  }
  const auto* x = static_cast<const std::uint16_t*>(data);
  if (element == Element::f16) {
    for (int i = 0; i < size; ++i) out[i] = from_half(x[i * stride]);
  } else {
    for (int i = 0; i < size; ++i) out[i] = from_bfloat(x[i * stride]);
  }
}

void store_row(const float* x, Element element, int size, void* out) {
  if (element == Element::f32) {
    std::memcpy(out, x, static_cast<std::size_t>(size) * sizeof(float));
    return;
  }
  auto* to = static_cast<std::uint16_t*>(out);
  if (element == Element::f16) {
    for (int i = 0; i < size; ++i) to[i] = to_half(x[i]);
  } else {
    for (int i = 0; i < size; ++i) to[i] = to_bfloat(x[i]);
  }
}

void round_row(Element element, int size, float* x) {
  if (element == Element::f16) {
    for (int i = 0; i < size; ++i) x[i] = from_half(to_half(x[i]));
  } else if (element == Element::bf16) {
    for (int i = 0; i < size; ++i) x[i] = from_bfloat(to_bfloat(x[i]));
  }
}

void quantize_row(const QuantizedForm& form, const float* x, int size, std::uint8_t* packed, void* scales,
                  void* biases) {
  constexpr int kLargestGroup = 128;
  std::uint8_t quantized[kLargestGroup];
  const int group = form.group_size;
  const auto bins = static_cast<float>((1 << form.bits) - 1);
  auto* scale_at = static_cast<std::uint8_t*>(scales);
  auto* bias_at = static_cast<std::uint8_t*>(biases);
  for (int begin = 0; begin < size; begin += group, x += group) {
    float low = std::numeric_limits<float>::infinity();
    float high = -low;
    for (int i = 0; i < group; ++i) {
      high = high < x[i] ? x[i] : high;
      low = x[i] < low ? x[i] : low;
    }
    // The edge that is farther from zero is hit exactly.
    const bool from_low = std::abs(low) > std::abs(high);
    float scale = std::max((high - low) / bins, 1e-7f);
    if (!from_low) scale = -scale;
    const float edge = from_low ? low : high;
    const float steps = std::rint(edge / scale);
    float bias = 0.0f;
    if (steps != 0.0f) {
      scale = edge / steps;
      bias = edge;
    }
    for (int i = 0; i < group; ++i) {
      const float q = nearest((x[i] - bias) / scale);
      quantized[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(std::min(std::max(q, 0.0f), bins)));
    }
    pack(quantized, group, form.bits, packed);
    packed += group * form.bits / 8;
    store_row(&scale, form.element, 1, scale_at);
    store_row(&bias, form.element, 1, bias_at);
    scale_at += size_of(form.element);
    bias_at += size_of(form.element);
  }
}

}  // namespace reprise::kernels::cpu
