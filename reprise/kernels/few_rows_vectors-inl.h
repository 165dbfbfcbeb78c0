// What few_rows' kernels share. Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "reprise/kernels/cpu.h"
#include "reprise/kernels/few_rows_layout.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 64 bytes, which Layout counts on.
using Bytes = hn::CappedTag<std::uint8_t, kMaxVectorBytes>;
using Int8s = hn::Repartition<std::int8_t, Bytes>;
using Int16s = hn::Repartition<std::int16_t, Bytes>;
using Int32s = hn::Repartition<std::int32_t, Bytes>;
using Floats = hn::Repartition<float, Bytes>;

// Instructions that multiply bytes with signed bytes and add each four products to 32 bits.
inline constexpr bool kByteProducts = HWY_TARGET <= HWY_AVX3_DL;

// Columns are finished four at a time, so that their sums are added up together.
inline constexpr std::size_t kQuad = 4;
// How far ahead weights are asked for, in bytes: what is taken next, where a quad is short.
inline std::size_t bytes_ahead(std::size_t stride) {
  constexpr std::size_t kAhead = 2048;
  return stride >= kAhead ? kAhead : round_up(kAhead, kQuad * stride);
}

// Asks for all of [from, from + bytes).
HWY_INLINE void prefetch(const void* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) hwy::Prefetch(static_cast<const std::uint8_t*>(from) + i);
}

// The first `bytes` bytes, a multiple of four, and zeros; reads no more.
HWY_INLINE hn::Vec<Bytes> load_first(const std::uint8_t* from, std::size_t bytes) {
#if HWY_TARGET <= HWY_AVX2
  const hn::Repartition<std::uint32_t, Bytes> d;
  return hn::BitCast(Bytes(),
                     hn::MaskedLoad(hn::FirstN(d, bytes / 4), d, reinterpret_cast<const std::uint32_t*>(from)));
#else
  alignas(kMaxVectorBytes) std::uint8_t buffer[kMaxVectorBytes] = {};
  std::memcpy(buffer, from, bytes);
  return hn::Load(Bytes(), buffer);
#endif
}

// What a weight's bits stand for.
enum class Values { numbers, e2m1 };

// Bytes below 16 → what these codes stand for.
HWY_INLINE hn::Vec<Bytes> e2m1_values(hn::Vec<Bytes> codes) {
  return hn::TableLookupBytes(hn::LoadDup128(Bytes(), kE2m1Raised), codes);
}

// Packed weights → parts of 16-bit values.
template <int kWidth, Values kValues>
HWY_INLINE void unpack(hn::Vec<Bytes> packed, hn::Vec<Int16s>* HWY_RESTRICT values) {
  const Int16s d;
  const hn::Repartition<std::uint16_t, Bytes> du;
  constexpr int kParts = 16 / kWidth;
  const auto bits = hn::BitCast(du, packed);
  const auto mask = hn::Set(du, (1U << kWidth) - 1);
  values[0] = hn::BitCast(d, hn::And(bits, mask));
  if constexpr (kParts == 4) {
    values[1] = hn::BitCast(d, hn::And(hn::ShiftRight<4>(bits), mask));
    values[2] = hn::BitCast(d, hn::And(hn::ShiftRight<8>(bits), mask));
  }
  values[kParts - 1] = hn::BitCast(d, hn::ShiftRight<16 - kWidth>(bits));
  if constexpr (kValues == Values::e2m1) {
    const auto lower = hn::Set(d, 0xff);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part)
      values[part] = hn::And(hn::BitCast(d, e2m1_values(hn::BitCast(Bytes(), values[part]))), lower);
  }
}

struct PowerOfTwo {
  std::uint8_t exponent;
};

// Elements from any address, as floats.
template <typename T>
HWY_INLINE hn::Vec<Floats> load_floats(const std::uint8_t* from) {
  const Floats df;
  if constexpr (std::is_same_v<T, PowerOfTwo>) {
    const hn::Repartition<std::uint32_t, Bytes> d32;
    const auto exponents = hn::PromoteTo(d32, hn::LoadU(hn::Rebind<std::uint8_t, Floats>(), from));
    return hn::BitCast(df, hn::ShiftLeft<23>(exponents));
  } else if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(df, reinterpret_cast<const float*>(from));
  } else {
    return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, Floats>(), reinterpret_cast<const T*>(from)));
  }
}

// Elements [first, first + count) as floats; writes whole vectors.
template <typename T>
void to_floats(const void* from, std::size_t first, std::size_t count, float* HWY_RESTRICT out) {
  const Floats df;
  const std::size_t lanes = hn::Lanes(df);
  const auto* bytes = static_cast<const std::uint8_t*>(from) + first * sizeof(T);
  std::size_t k = 0;
  for (; k + lanes <= count; k += lanes) hn::StoreU(load_floats<T>(bytes + k * sizeof(T)), df, out + k);
  if (k < count) {
    alignas(kMaxVectorBytes) std::uint8_t rest[kMaxVectorBytes] = {};
    std::memcpy(rest, bytes + k * sizeof(T), (count - k) * sizeof(T));
    hn::StoreU(load_floats<T>(rest), df, out + k);
  }
}

inline void to_floats(Element element, const void* from, std::size_t first, std::size_t count,
                      float* HWY_RESTRICT out) {
  switch (element) {
    case Element::f16:
      return to_floats<hwy::float16_t>(from, first, count, out);
    case Element::bf16:
      return to_floats<hwy::bfloat16_t>(from, first, count, out);
    case Element::f32:
      return to_floats<float>(from, first, count, out);
    case Element::e8m0:
      return to_floats<PowerOfTwo>(from, first, count, out);
  }
}

// [first, first + count) of a weight's scales or biases as the values' form has them; writes whole vectors.
inline void times(float factor, std::size_t count, float* HWY_RESTRICT values) {
  const Floats df;
  for (std::size_t k = 0; k < count; k += hn::Lanes(df))
    hn::StoreU(hn::Mul(hn::LoadU(df, values + k), hn::Set(df, factor)), df, values + k);
}

inline void scales_of(const WeightView& weight, std::size_t first, std::size_t count, float* HWY_RESTRICT out) {
  to_floats(weight.element, weight.scales, first, count, out);
  if (is_e2m1(weight)) times(0.5F, count, out);
}

inline void biases_of(const WeightView& weight, std::size_t first, std::size_t count, float* HWY_RESTRICT out) {
  if (!is_e2m1(weight) && !weight.centred) return to_floats(weight.element, weight.biases, first, count, out);
  to_floats(weight.element, weight.scales, first, count, out);
  times(is_e2m1(weight) ? -0.5F * kE2m1Zero : -static_cast<float>(1 << (weight.bits - 1)), count, out);
}

// The sums over the lanes of four vectors → out[0, count).
HWY_INLINE void store_quad(hn::Vec<Floats> a, hn::Vec<Floats> b, hn::Vec<Floats> c, hn::Vec<Floats> d,
                           std::size_t count, float* HWY_RESTRICT out) {
  const Floats df;
  const hn::Repartition<double, Bytes> dd;
  // In each 128-bit block: [a b a b], [c d c d], then [a b c d].
  const auto ab = hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b)));
  const auto cd = hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, c, d), hn::InterleaveUpper(df, c, d)));
  const auto abcd =
      hn::Add(hn::BitCast(df, hn::InterleaveLower(dd, ab, cd)), hn::BitCast(df, hn::InterleaveUpper(dd, ab, cd)));
  const hn::Full128<float> quad;
#if HWY_MAX_BYTES >= 64
  const hn::Half<Floats> half;
  const auto halves = hn::Add(hn::LowerHalf(half, abcd), hn::UpperHalf(half, abcd));
  const auto total = hn::Add(hn::LowerHalf(quad, halves), hn::UpperHalf(quad, halves));
#elif HWY_MAX_BYTES >= 32
  const auto total = hn::Add(hn::LowerHalf(quad, abcd), hn::UpperHalf(quad, abcd));
#else
  const auto total = abcd;
#endif
  if (count == kQuad) {
    hn::StoreU(total, quad, out);
  } else {
    alignas(16) float buffer[kQuad];
    hn::Store(total, quad, buffer);
    std::copy_n(buffer, count, out);
  }
}

// Calls body(rows, first) for rows [first, first + rows) until all are done; `rows` is a constant, each of kTiles as
// often as it fits. Which of them share a call does not change their sums.
template <int... kTiles, typename Body>
HWY_INLINE void for_tiles(std::integer_sequence<int, kTiles...> /*tiles*/, int num_rows, Body body) {
  std::size_t first = 0;
  const auto take = [&](auto rows) {
    for (; num_rows >= rows; num_rows -= rows, first += rows) body(rows, first);
  };
  (take(std::integral_constant<int, kTiles>()), ...);
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
