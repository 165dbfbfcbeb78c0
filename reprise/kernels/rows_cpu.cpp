#include "reprise/kernels/rows_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/rows_cpu.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

// Compiled without contraction of products and sums: fused ones round otherwise than MLX's.

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The first whole vectors of `count` floats as float16, clamped to `largest`. Returns: how many are done. Highway's
// emulation of the conversion truncates, so only hardware does it.
std::size_t vector_halves(const float* x, std::size_t count, float largest, std::uint16_t* out) {
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
  const hn::ScalableTag<float> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> dh;
  const hn::RebindToUnsigned<decltype(dh)> du;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    // Of a NaN and a number x86 takes the second.
    const auto clamped = hn::Max(hn::Set(d, -largest), hn::Min(hn::Set(d, largest), hn::LoadU(d, x + i)));
    hn::StoreU(hn::BitCast(du, hn::DemoteTo(dh, clamped)), du, out + i);
  }
  return i;
#else
  (void)x, (void)count, (void)largest, (void)out;
  return 0;
#endif
}

// Least and greatest of `count` numbers, of which there is a multiple of 16.
void extremes(const float* x, std::size_t count, float* low, float* high) {
  const hn::CappedTag<float, 16> d;
  auto least = hn::LoadU(d, x);
  auto greatest = least;
  for (std::size_t i = hn::Lanes(d); i < count; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + i);
    least = hn::Min(least, v);
    greatest = hn::Max(greatest, v);
  }
  *low = hn::GetLane(hn::MinOfLanes(d, least));
  *high = hn::GetLane(hn::MaxOfLanes(d, greatest));
}

// round((x - bias) / scale) within [0, bins], a byte each.
void steps_of(const float* x, std::size_t count, float scale, float bias, int bins, std::uint8_t* out) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint8_t, decltype(d)> db;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto steps = hn::Div(hn::Sub(hn::LoadU(d, x + i), hn::Set(d, bias)), hn::Set(d, scale));
    const auto within = hn::Max(hn::Min(hn::NearestInt(steps), hn::Set(di, bins)), hn::Zero(di));
    hn::StoreU(hn::DemoteTo(db, within), db, out + i);
  }
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(vector_halves);
HWY_EXPORT(extremes);
HWY_EXPORT(steps_of);

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
  const auto count = static_cast<std::size_t>(size);
  if (element == Element::f16) {
    std::size_t i = HWY_DYNAMIC_DISPATCH(vector_halves)(x, count, kLargestHalf, to);
    for (; i < count; ++i) to[i] = to_half(x[i]);
  } else {
    for (std::size_t i = 0; i < count; ++i) to[i] = to_bfloat(x[i]);
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
    float low = 0.0f;
    float high = 0.0f;
    HWY_DYNAMIC_DISPATCH(extremes)(x, static_cast<std::size_t>(group), &low, &high);
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
    HWY_DYNAMIC_DISPATCH(steps_of)(x, static_cast<std::size_t>(group), scale, bias, (1 << form.bits) - 1, quantized);
    pack(quantized, group, form.bits, packed);
    packed += group * form.bits / 8;
    store_row(&scale, form.element, 1, scale_at);
    store_row(&bias, form.element, 1, bias_at);
    scale_at += size_of(form.element);
    bias_at += size_of(form.element);
  }
}

}  // namespace reprise::kernels::cpu
#endif  // HWY_ONCE
