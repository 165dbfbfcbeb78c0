// Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_PACKED_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_PACKED_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_PACKED_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_vectors-inl.h"
#include "reprise/kernels/scratch.h"
#include "reprise/kernels/unpack.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Four rows of the weight, with their groups' scales and biases as floats; readable for kMaxVectorBytes past the last
// group.
struct Columns {
  const std::uint8_t* packed[kQuad];
  const float* scales[kQuad];
  const float* biases[kQuad];
  std::size_t row_bytes;
};

// Σ products of neighbours, added to sums. NEON has two halves of sums: any order of 32-bit lanes will do there, since
// a vector is never longer than a group.
HWY_INLINE hn::Vec<Int32s> add_products(hn::Vec<Int16s> a, hn::Vec<Int16s> b, hn::Vec<Int32s> sums) {
#if HWY_TARGET <= HWY_AVX3_DL
  // Highway multiplies and adds in two instructions here too.
  return hn::Vec<Int32s>{_mm512_dpwssd_epi32(sums.raw, a.raw, b.raw)};
#else
  const Int32s d;
  auto other = hn::Zero(d);
  sums = hn::ReorderWidenMulAccumulate(d, a, b, sums, other);
#if HWY_TARGET <= HWY_SSE2
  return sums;
#else
  return hn::Add(sums, other);
#endif
#endif
}

// The first `bytes` bytes, a multiple of four, and zeros; reads no more.
HWY_INLINE hn::Vec<Int16s> load_first(const std::uint8_t* from, std::size_t bytes) {
#if HWY_TARGET <= HWY_AVX2
  const hn::Repartition<std::uint32_t, Bytes> d;
  return hn::BitCast(Int16s(),
                     hn::MaskedLoad(hn::FirstN(d, bytes / 4), d, reinterpret_cast<const std::uint32_t*>(from)));
#else
  alignas(kMaxVectorBytes) std::uint8_t buffer[kMaxVectorBytes] = {};
  std::memcpy(buffer, from, bytes);
  return hn::BitCast(Int16s(), hn::Load(Bytes(), buffer));
#endif
}

// Each 32-bit lane's own scale, of those that begin with the block's first.
template <int kBits, typename Indices>
HWY_INLINE hn::Vec<Floats> lane_scales(const float* scales, Indices indices) {
  const Floats df;
  constexpr std::size_t kMostGroups = HWY_LANES(float) * (32 / kBits) / 32;
  if constexpr (kMostGroups <= 1) {
    return hn::Set(df, *scales);
  } else if constexpr (kMostGroups <= 4) {
    return hn::TableLookupLanes(hn::LoadDup128(df, scales), indices);
  } else {
    return hn::TableLookupLanes(hn::LoadU(df, scales), indices);
  }
}

// acc[r] += scale · row r's scale · Σ value · x for one block.
template <int kBits, int kRows>
HWY_INLINE void add_block(hn::Vec<Int16s> packed, hn::Vec<Floats> scales, const std::uint8_t* HWY_RESTRICT x,
                          std::size_t row_bytes, hn::Vec<Floats>* HWY_RESTRICT acc) {
  const Int16s d;
  const Floats df;
  constexpr int kParts = 16 / kBits;
  const hn::Repartition<std::uint16_t, Bytes> du;
  const auto mask = hn::Set(du, (1U << kBits) - 1);
  const auto bits = hn::BitCast(du, packed);
  hn::Vec<Int16s> values[kParts];
  values[0] = hn::BitCast(d, hn::And(bits, mask));
#pragma GCC unroll 8
  for (int part = 1; part < kParts; ++part) {
    const auto shifted = hn::ShiftRightSame(bits, part * kBits);
    values[part] = hn::BitCast(d, part == kParts - 1 ? shifted : hn::And(shifted, mask));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto* row = reinterpret_cast<const std::int16_t*>(x + static_cast<std::size_t>(r) * row_bytes);
    auto sums = hn::Zero(Int32s());
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part)
      sums = add_products(values[part], hn::Load(d, row + static_cast<std::size_t>(part) * hn::Lanes(d)), sums);
    const auto row_scales = hn::Load(df, reinterpret_cast<const float*>(row + kParts * hn::Lanes(d)));
    acc[r] = hn::MulAdd(hn::ConvertTo(df, sums), hn::Mul(scales, row_scales), acc[r]);
  }
}

// Rows [first, first + kRows) times `kColumns` columns from `column` on: the sums, still to be added up over the lanes,
// go to sums[column][row].
template <int kBits, int kRows, int kColumns>
HWY_INLINE void dot(const Layout& layout, const Columns& columns, std::size_t column, const std::uint8_t* prepared,
                    std::size_t first, float* HWY_RESTRICT sums) {
  const Floats df;
  const Bytes d8;
  const std::size_t vector_bytes = hn::Lanes(d8);
  const auto group_shift = static_cast<unsigned>(std::countr_zero(layout.group_size));
  constexpr std::size_t kValuesInLane = 32 / kBits;
  alignas(kMaxVectorBytes) std::int32_t lane_groups[HWY_LANES(float)];
  for (std::size_t lane = 0; lane < HWY_LANES(float); ++lane)
    lane_groups[lane] = static_cast<std::int32_t>((lane * kValuesInLane) >> group_shift);
  const auto indices = hn::SetTableIndices(df, lane_groups);

  hn::Vec<Floats> acc[kColumns][kRows];
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[c][r] = hn::Zero(df);

  const std::uint8_t* x = prepared + first * layout.row_bytes;
  const std::size_t full_blocks = columns.row_bytes / vector_bytes;
  for (std::size_t v = 0; v < full_blocks; ++v, x += layout.block_bytes) {
    const std::size_t group = (v * layout.values) >> group_shift;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const std::uint8_t* from = columns.packed[column + static_cast<std::size_t>(c)] + v * vector_bytes;
      hwy::Prefetch(from + kAhead);
      add_block<kBits, kRows>(hn::BitCast(Int16s(), hn::LoadU(d8, from)),
                              lane_scales<kBits>(columns.scales[column + static_cast<std::size_t>(c)] + group, indices),
                              x, layout.row_bytes, acc[c]);
    }
  }
  if (const std::size_t rest = columns.row_bytes - full_blocks * vector_bytes; rest != 0) {
    const std::size_t group = (full_blocks * layout.values) >> group_shift;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      add_block<kBits, kRows>(
          load_first(columns.packed[column + static_cast<std::size_t>(c)] + full_blocks * vector_bytes, rest),
          lane_scales<kBits>(columns.scales[column + static_cast<std::size_t>(c)] + group, indices), x,
          layout.row_bytes, acc[c]);
  }

  const auto* row_sums = reinterpret_cast<const float*>(prepared + layout.sums_offset) + first * layout.sums_stride;
  const std::size_t lanes = hn::Lanes(df);
  for (std::size_t g = 0; g < layout.groups; g += lanes) {
    const auto present = hn::FirstN(df, std::min(lanes, layout.groups - g));
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const auto biases =
          hn::IfThenElseZero(present, hn::LoadU(df, columns.biases[column + static_cast<std::size_t>(c)] + g));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        acc[c][r] = hn::MulAdd(biases, hn::Load(df, row_sums + static_cast<std::size_t>(r) * layout.sums_stride + g),
                               acc[c][r]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      hn::Store(acc[c][r], df, sums + (static_cast<std::size_t>(c) * kRows + static_cast<std::size_t>(r)) * lanes);
}

template <int kBits, int kRows>
HWY_NOINLINE void quad_times_rows(const Layout& layout, const Columns& columns, const std::uint8_t* prepared,
                                  std::size_t first, std::size_t count, float* out, std::size_t ldo) {
  // As many sums as registers hold, beside the unpacked values.
  constexpr int kColumns = kRows >= 4 ? 1 : kRows >= 2 ? 2 : 4;
  alignas(kMaxVectorBytes) float sums[kQuad * kRows * HWY_LANES(float)];
  for (std::size_t column = 0; column < kQuad; column += kColumns)
    dot<kBits, kRows, kColumns>(layout, columns, column, prepared, first, sums + column * kRows * HWY_LANES(float));
  for (std::size_t r = 0; r < kRows; ++r)
    store_quad(sums + r * HWY_LANES(float), kRows * HWY_LANES(float), count, out + (first + r) * ldo);
}

template <int kBits>
void multiply_packed(const WeightView& weight, const Layout& layout, int num_rows, const std::uint8_t* prepared,
                     int begin, int end, float* out, std::size_t ldo) {
  const std::size_t groups = layout.groups;
  // Scales and biases of a few columns at a time are made floats.
  constexpr std::size_t kGroupsAtOnce = 1536;
  const std::size_t at_once = std::clamp<std::size_t>(kGroupsAtOnce / groups / kQuad * kQuad, kQuad, 32);
  const std::size_t room = at_once * groups + kMaxVectorBytes;
  // Odd widths become bytes, a quad at a time.
  const bool odd = weight.bits != kBits;
  const std::size_t bytes_stride = round_up(layout.cols, kMaxVectorBytes);
  auto* scales = static_cast<float*>(scratch(2 * room * sizeof(float) + (odd ? kQuad * bytes_stride : 0)));
  float* biases = scales + room;
  auto* bytes = reinterpret_cast<std::uint8_t*>(biases + room);
  std::fill_n(scales + at_once * groups, kMaxVectorBytes, 0.0F);

  Columns columns;
  const std::size_t packed_stride = layout.cols * static_cast<std::size_t>(weight.bits) / 8;
  columns.row_bytes = odd ? layout.cols : packed_stride;
  const auto* packed = static_cast<const std::uint8_t*>(weight.data);
  const auto last = static_cast<std::size_t>(end);
  for (auto n = static_cast<std::size_t>(begin); n < last; n += at_once) {
    const std::size_t present = std::min(at_once, last - n);
    to_floats(weight.element, weight.scales, n * groups, present * groups, scales);
    to_floats(weight.element, weight.biases, n * groups, present * groups, biases);
    for (std::size_t q = 0; q < present; q += kQuad) {
      for (std::size_t c = 0; c < kQuad; ++c) {
        const std::size_t column = std::min(q + c, present - 1);
        columns.packed[c] = packed + (n + column) * packed_stride;
        if (odd) {
          std::uint8_t* to = bytes + c * bytes_stride;
          for (std::size_t k = 0; k < layout.cols; ++k)
            to[k] = static_cast<std::uint8_t>(packed_at(columns.packed[c], weight.bits, k));
          columns.packed[c] = to;
        }
        columns.scales[c] = scales + column * groups;
        columns.biases[c] = biases + column * groups;
      }
      float* to = out + (n + q - static_cast<std::size_t>(begin));
      for_tiles(num_rows, [&](auto rows, std::size_t first) {
        quad_times_rows<kBits, rows>(layout, columns, prepared, first, std::min(kQuad, present - q), to, ldo);
      });
    }
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
