// One row times quantised weights. Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
//
// A vector runs along a column, so its lanes belong to one or several groups. Lanes are added up when a column is done.
#if defined(REPRISE_KERNELS_FEW_ROWS_ONE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_ONE_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_ONE_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_ONE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET <= HWY_AVX3_DL
// sums + Σ of each four products of bytes and signed bytes.
HWY_INLINE hn::Vec<Int32s> add_bytes(hn::Vec<Bytes> a, const std::uint8_t* b, hn::Vec<Int32s> sums) {
  // Highway has no such operation, and does not let the compiler use the instruction.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.raw) : "v"(a.raw), "m"(*reinterpret_cast<const __m512i*>(b)));
  return sums;
}
#endif

// Σ weight · x of one block in each 32-bit lane.
template <int kWidth, Values kValues>
HWY_INLINE hn::Vec<Int32s> dot_block(hn::Vec<Bytes> packed, const std::uint8_t* HWY_RESTRICT x) {
  auto sums = hn::Zero(Int32s());
#if HWY_TARGET <= HWY_AVX3_DL
  constexpr std::size_t kVector = HWY_LANES(std::uint8_t);
  if constexpr (kWidth == 8) {
    sums = hn::ShiftLeft<8>(add_bytes(packed, x, sums));
    return add_bytes(packed, x + kVector, sums);
  } else {
    const Bytes d;
    const hn::Repartition<std::uint16_t, Bytes> d16;
    const auto mask = hn::Set(d, 15);
    auto even = hn::And(packed, mask);
    auto odd = hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, packed))), mask);
    if constexpr (kValues == Values::e2m1) {
      even = e2m1_values(even);
      odd = e2m1_values(odd);
    }
    sums = hn::ShiftLeft<8>(add_bytes(odd, x + kVector, add_bytes(even, x, sums)));
    return add_bytes(odd, x + 3 * kVector, add_bytes(even, x + 2 * kVector, sums));
  }
#else
  const Int16s d;
  const auto* parts = reinterpret_cast<const std::int16_t*>(x);
  hn::Vec<Int16s> values[16 / kWidth];
  unpack<kWidth, kValues>(packed, values);
  // NEON has two sums, of either half of the lanes; there a vector is never longer than a group.
  auto other = hn::Zero(Int32s());
#pragma GCC unroll 4
  for (std::size_t part = 0; part < 16 / kWidth; ++part)
    sums = hn::ReorderWidenMulAccumulate(Int32s(), values[part], hn::Load(d, parts + part * hn::Lanes(d)), sums, other);
  return hn::Add(sums, other);
#endif
}

// Each lane's own scale, of those that begin with the block's first. kLeastGroup: a group is no smaller.
template <int kWidth, int kLeastGroup, typename Indices>
HWY_INLINE hn::Vec<Floats> lane_scales(const float* scales, Indices indices) {
  const Floats df;
  constexpr std::size_t kMostGroups = HWY_LANES(std::uint8_t) * 8 / kWidth / kLeastGroup;
  static_assert(kMostGroups <= 4, "as many as 128 bits hold");
  if constexpr (kMostGroups <= 1) {
    return hn::Set(df, *scales);
  } else {
    return hn::TableLookupLanes(hn::LoadDup128(df, scales), indices);
  }
}

// Some columns, `stride` bytes apart, with their groups' scales (those of the weight times those of the row) and
// biases; floats are readable for kMaxLanes past the last group.
struct Columns {
  const std::uint8_t* packed;
  std::size_t stride;
  std::size_t bytes;
  const float* scales;
  const float* biases;
  std::size_t count;
};

template <int kWidth, Values kValues, int kLeastGroup>
HWY_NOINLINE void columns_times_row(const Layout& layout, const Columns& columns,
                                    const std::uint8_t* HWY_RESTRICT prepared, float* HWY_RESTRICT out) {
  const Floats df;
  const Bytes d8;
  constexpr std::size_t kVector = HWY_LANES(std::uint8_t);
  constexpr std::size_t kLanes = HWY_LANES(float);
  const auto group_shift = static_cast<unsigned>(std::countr_zero(layout.group_size));
  alignas(kMaxVectorBytes) std::int32_t lane_groups[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    lane_groups[lane] = static_cast<std::int32_t>((lane * 32 / kWidth) >> group_shift);
  const auto indices = hn::SetTableIndices(df, lane_groups);
  const auto* sums = reinterpret_cast<const float*>(prepared + layout.sums_offset);
  const std::size_t whole = columns.bytes / kVector;
  const std::size_t rest = columns.bytes % kVector;
  const std::size_t groups = layout.groups;
  const std::size_t ahead = bytes_ahead(columns.stride);

  for (std::size_t n = 0; n < columns.count; n += kQuad) {
    const std::uint8_t* packed[kQuad];
    const float* scales[kQuad];
    hn::Vec<Floats> acc[kQuad];
#pragma GCC unroll 4
    for (std::size_t c = 0; c < kQuad; ++c) {
      const std::size_t column = std::min(n + c, columns.count - 1);
      packed[c] = columns.packed + column * columns.stride;
      scales[c] = columns.scales + column * groups;
      acc[c] = hn::Zero(df);
    }
    const std::uint8_t* HWY_RESTRICT x = prepared;
    for (std::size_t v = 0; v < whole; ++v, x += layout.block_bytes) {
      const std::size_t group = (v * layout.values) >> group_shift;
#pragma GCC unroll 4
      for (std::size_t c = 0; c < kQuad; ++c) {
        hwy::Prefetch(packed[c] + v * kVector + ahead);
        const auto dot = dot_block<kWidth, kValues>(hn::LoadU(d8, packed[c] + v * kVector), x);
        acc[c] =
            hn::MulAdd(hn::ConvertTo(df, dot), lane_scales<kWidth, kLeastGroup>(scales[c] + group, indices), acc[c]);
      }
    }
    if (rest != 0) {
      const std::size_t group = (whole * layout.values) >> group_shift;
#pragma GCC unroll 4
      for (std::size_t c = 0; c < kQuad; ++c) {
        const auto dot = dot_block<kWidth, kValues>(load_first(packed[c] + whole * kVector, rest), x);
        acc[c] =
            hn::MulAdd(hn::ConvertTo(df, dot), lane_scales<kWidth, kLeastGroup>(scales[c] + group, indices), acc[c]);
      }
    }
    for (std::size_t g = 0; g < groups; g += kLanes) {
      const auto present = hn::FirstN(df, std::min(kLanes, groups - g));
      const auto group_sums = hn::Load(df, sums + g);
#pragma GCC unroll 4
      for (std::size_t c = 0; c < kQuad; ++c) {
        const float* biases = columns.biases + std::min(n + c, columns.count - 1) * groups;
        acc[c] = hn::MulAdd(hn::IfThenElseZero(present, hn::LoadU(df, biases + g)), group_sums, acc[c]);
      }
    }
    store_quad(acc[0], acc[1], acc[2], acc[3], std::min(kQuad, columns.count - n), out + n);
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
