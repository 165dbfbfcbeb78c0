// What few_rows' kernels share. Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/vnni-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 64 bytes, which Layout counts on.
using Bytes = hn::CappedTag<std::uint8_t, kMaxVectorBytes>;
using Int16s = hn::Repartition<std::int16_t, Bytes>;
using Int32s = hn::Repartition<std::int32_t, Bytes>;
using Floats = hn::Repartition<float, Bytes>;

// Columns are finished four at a time, so that their sums are added up together.
inline constexpr std::size_t kQuad = 4;
// Weights come from memory in order; they are asked for this many bytes ahead.
#ifndef FEW_PREFETCH
#define FEW_PREFETCH 1024
#endif
inline constexpr std::size_t kAhead = FEW_PREFETCH;

// Elements from any address, as floats.
template <typename T>
HWY_INLINE hn::Vec<Floats> load_floats(const std::uint8_t* from) {
  const Floats df;
  if constexpr (std::is_same_v<T, float>) {
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
  }
}

// Sums over the lanes of four vectors, `stride` floats apart → out[0, count).
HWY_INLINE void store_quad(const float* HWY_RESTRICT sums, std::size_t stride, std::size_t count,
                           float* HWY_RESTRICT out) {
  const Floats df;
  const hn::Repartition<double, Bytes> dd;
  const auto a = hn::Load(df, sums);
  const auto b = hn::Load(df, sums + stride);
  const auto c = hn::Load(df, sums + 2 * stride);
  const auto d = hn::Load(df, sums + 3 * stride);
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

// Calls body(rows, first) for rows [first, first + rows) until all are done; `rows` is a constant. Which of them share
// a call does not change their sums.
template <typename Body>
HWY_INLINE void for_tiles(int num_rows, Body body) {
  std::size_t first = 0;
  int left = num_rows;
  for (; left >= 8; left -= 8, first += 8) body(std::integral_constant<int, 8>(), first);
  if (left >= 4) {
    body(std::integral_constant<int, 4>(), first);
    first += 4;
    left -= 4;
  }
  if (left == 3) body(std::integral_constant<int, 3>(), first);
  if (left == 2) body(std::integral_constant<int, 2>(), first);
  if (left == 1) body(std::integral_constant<int, 1>(), first);
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
