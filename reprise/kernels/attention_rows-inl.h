// Stored rows as float vectors, for each instruction set: included once per Highway target. Private to `kernels`.
// Nothing here reads past the end of a row.
#if defined(REPRISE_KERNELS_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_ATTENTION_ROWS_INL_H_
#undef REPRISE_KERNELS_ATTENTION_ROWS_INL_H_
#else
#define REPRISE_KERNELS_ATTENTION_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "reprise/kernels/attention_blocks.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::internal::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;
inline constexpr std::size_t kLanes = hn::MaxLanes(F32());

// 2^x for x ≤ 0; 0 below the smallest normal number. Relative error 2e-7.
HWY_INLINE VF exp2_of_nonpositive(VF x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  // Adding 1.5 · 2^23 rounds to an integer, which then stands in the lowest bits.
  const VF magic = hn::Set(d, 12582912.0f);
  const VF shifted = hn::Add(x, magic);
  const VF f = hn::Sub(x, hn::Sub(shifted, magic));
  VF y = hn::Set(d, 0.0013276470126584172f);
  y = hn::MulAdd(y, f, hn::Set(d, 0.009675540961325169f));
  y = hn::MulAdd(y, f, hn::Set(d, 0.05550713092088699f));
  y = hn::MulAdd(y, f, hn::Set(d, 0.24022120237350464f));
  y = hn::MulAdd(y, f, hn::Set(d, 0.6931469440460205f));
  y = hn::MulAdd(y, f, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  y = hn::BitCast(d, hn::Add(hn::BitCast(di, y), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), y);
}

// cap · tanh(score / cap). Both are logarithms of base 2, so that the power inside is one of 2.
HWY_INLINE VF capped(VF score, float cap) {
  const F32 d;
  const VF size = hn::Mul(hn::Abs(score), hn::Set(d, -2.0f * kLog2E / cap));
  const VF power = exp2_of_nonpositive(size);
  const VF one = hn::Set(d, 1.0f);
  const VF tanh = hn::Div(hn::Sub(one, power), hn::Add(one, power));
  return hn::CopySign(hn::Mul(hn::Set(d, cap), tanh), score);
}

HWY_INLINE VF load_floats(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE VF load_floats(const hwy::float16_t* from) {
  return hn::PromoteTo(F32(), hn::LoadU(hn::Rebind<hwy::float16_t, F32>(), from));
}
HWY_INLINE VF load_floats(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(F32(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, F32>(), from));
}

template <typename T>
HWY_INLINE void widen(const T* from, std::size_t count, float* to) {
  const F32 d;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_floats(from + i), d, to + i);
  if (i == count) return;
  HWY_ALIGN T rest[kLanes] = {};
  HWY_ALIGN float wide[kLanes];
  std::memcpy(rest, from + i, (count - i) * sizeof(T));
  hn::Store(load_floats(rest), d, wide);
  std::memcpy(to + i, wide, (count - i) * sizeof(float));
}

// Calls use(pointer of the element's type).
template <class Use>
HWY_INLINE void with_element(Element element, const void* data, const Use& use) {
  if (element == Element::f32) {
    use(static_cast<const float*>(data));
  } else if (element == Element::f16) {
    use(static_cast<const hwy::float16_t*>(data));
  } else {
    use(static_cast<const hwy::bfloat16_t*>(data));
  }
}

struct WidenTo {
  std::ptrdiff_t at;
  std::size_t count;
  float* to;
  template <typename T>
  HWY_INLINE void operator()(const T* data) const {
    widen(data + at, count, to);
  }
};

// Quantised numbers of one row as floats, kLanes at a time: features i to i + kLanes - 1, i a multiple of kLanes.
HWY_INLINE VF numbers8(const std::uint8_t* row, std::size_t i) {
  const hn::RebindToSigned<F32> di;
  const auto bytes = hn::LoadU(hn::Rebind<std::uint8_t, F32>(), row + i);
  return hn::ConvertTo(F32(), hn::PromoteTo(di, bytes));
}

HWY_INLINE std::uint32_t word_at(const std::uint8_t* from) {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// A word holds eight numbers; each lane gets its own's word and shifts it.
HWY_INLINE VF numbers4(const std::uint8_t* row, std::size_t i) {
  const hn::RebindToUnsigned<F32> du;
  const hn::RebindToSigned<F32> di;
  const auto lane = hn::Iota(du, 0);
  const std::uint8_t* from = row + i / 8 * 4;
  auto words = hn::Set(du, word_at(from));
  auto in_word = lane;
  if constexpr (kLanes == 16) {
    words = hn::IfThenElse(hn::Lt(lane, hn::Set(du, 8)), words, hn::Set(du, word_at(from + 4)));
    in_word = hn::And(lane, hn::Set(du, 7));
  } else if constexpr (kLanes < 8) {
    in_word = hn::Add(lane, hn::Set(du, static_cast<std::uint32_t>(i % 8)));
  }
  const auto q = hn::And(hn::Shr(words, hn::ShiftLeft<2>(in_word)), hn::Set(du, 15));
  return hn::ConvertTo(F32(), hn::BitCast(di, q));
}

// Eight numbers of `bits` bits, which take `bits` bytes.
HWY_INLINE void numbers_of_eight(const std::uint8_t* from, int bits, float* to) {
  std::uint64_t all = 0;
  std::memcpy(&all, from, static_cast<std::size_t>(bits));
  const std::uint64_t mask = (1u << bits) - 1;
  for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(static_cast<std::int32_t>((all >> (i * bits)) & mask));
}

// Row `column` of keys or values, unpacked: out [rows.size]. `groups`: scratch of 2 * padded(size / group_size).
HWY_INLINE void unpack_row(const StoredRows& rows, int batch, int head, int column, float* groups, float* out) {
  const F32 d;
  const ColumnPlace place = place_of(rows, column);
  const std::ptrdiff_t at = batch * rows.batch_stride + head * rows.head_stride + place.column * rows.column_stride;
  const auto size = static_cast<std::size_t>(rows.size);
  if (rows.bits == 0) {
    with_element(rows.element, place.data, WidenTo{at, size, out});
    return;
  }
  const std::size_t group_size = static_cast<std::size_t>(rows.group_size);
  const std::size_t num_groups = size / group_size;
  const std::ptrdiff_t group_at =
      batch * rows.group_batch_stride + head * rows.group_head_stride + place.column * rows.group_column_stride;
  float* biases = groups + padded(num_groups);
  with_element(rows.element, place.scales, WidenTo{group_at, num_groups, groups});
  with_element(rows.element, place.biases, WidenTo{group_at, num_groups, biases});
  const auto* row = reinterpret_cast<const std::uint8_t*>(static_cast<const std::uint32_t*>(place.data) + at);
  for (std::size_t g = 0; g < num_groups; ++g) {
    const VF scale = hn::Set(d, groups[g]);
    const VF bias = hn::Set(d, biases[g]);
    const std::size_t end = (g + 1) * group_size;
    for (std::size_t i = g * group_size; i < end; i += kLanes) {
      VF q;
      if (rows.bits == 8) {
        q = numbers8(row, i);
      } else if (rows.bits == 4) {
        q = numbers4(row, i);
      } else {
        HWY_ALIGN float numbers[kLanes < 8 ? 8 : kLanes];
        const std::size_t first = i / 8 * 8;
        for (std::size_t k = first; k < i + kLanes; k += 8) {
          numbers_of_eight(row + k / 8 * static_cast<std::size_t>(rows.bits), rows.bits, numbers + (k - first));
        }
        q = hn::LoadU(d, numbers + (i - first));
      }
      hn::StoreU(hn::MulAdd(scale, q, bias), d, out + i);
    }
  }
}

}  // namespace reprise::kernels::cpu::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
