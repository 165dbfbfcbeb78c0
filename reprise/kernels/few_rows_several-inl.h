// Two to eight rows times quantised weights. Compiled once for each instruction set, see few_rows.cpp. Private to
// `kernels`.
//
// As many columns as a vector has 32-bit lanes (a panel) are taken together, one column a lane: products are added up
// as integers over a whole group, and scales, biases and sums need no work across lanes. That pays for transposing the
// weights as soon as a second row uses them.
#if defined(REPRISE_KERNELS_FEW_ROWS_SEVERAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_SEVERAL_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_SEVERAL_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_SEVERAL_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kPanel = HWY_LANES(float);

// How many rows share the unpacking of weights: registers have room for the sums of so many.
#if HWY_TARGET <= HWY_AVX3
using SeveralTiles = std::integer_sequence<int, 8, 7, 6, 5, 4, 3, 2, 1>;
#elif HWY_TARGET <= HWY_AVX2 || HWY_TARGET == HWY_NEON
using SeveralTiles = std::integer_sequence<int, 4, 3, 2, 1>;
#else
using SeveralTiles = std::integer_sequence<int, 4, 2, 1>;
#endif

// 16 bytes from each column of a panel, `stride` bytes apart → four vectors of 32-bit words, one column a lane.
HWY_INLINE void load_panel(const std::uint8_t* HWY_RESTRICT from, std::size_t stride, void* HWY_RESTRICT to) {
  const Floats d;
  const hn::Repartition<double, Bytes> dd;
  const auto load = [&](std::size_t column) {
    return hn::LoadDup128(d, reinterpret_cast<const float*>(from + column * stride));
  };
  hn::Vec<Floats> rows[4];
#pragma GCC unroll 4
  for (std::size_t c = 0; c < 4; ++c) {
    // Block b of the vector has column 4 b + c.
    rows[c] = load(c);
#if HWY_MAX_BYTES >= 64
    rows[c] = hn::IfThenElse(hn::FirstN(d, 4), rows[c], load(4 + c));
    rows[c] = hn::IfThenElse(hn::FirstN(d, 8), rows[c], load(8 + c));
    rows[c] = hn::IfThenElse(hn::FirstN(d, 12), rows[c], load(12 + c));
#elif HWY_MAX_BYTES >= 32
    rows[c] = hn::ConcatUpperLower(d, load(4 + c), rows[c]);
#endif
  }
  const auto lower01 = hn::BitCast(dd, hn::InterleaveLower(d, rows[0], rows[1]));
  const auto upper01 = hn::BitCast(dd, hn::InterleaveUpper(d, rows[0], rows[1]));
  const auto lower23 = hn::BitCast(dd, hn::InterleaveLower(d, rows[2], rows[3]));
  const auto upper23 = hn::BitCast(dd, hn::InterleaveUpper(d, rows[2], rows[3]));
  auto* words = static_cast<double*>(to);
  constexpr std::size_t kLanes = HWY_LANES(double);
  hn::Store(hn::InterleaveLower(dd, lower01, lower23), dd, words);
  hn::Store(hn::InterleaveUpper(dd, lower01, lower23), dd, words + kLanes);
  hn::Store(hn::InterleaveLower(dd, upper01, upper23), dd, words + 2 * kLanes);
  hn::Store(hn::InterleaveUpper(dd, upper01, upper23), dd, words + 3 * kLanes);
}

// A pair of products from each column, with the pair of inputs at x, added to sums.
HWY_INLINE void add_pair(hn::Vec<Int16s> values, const std::uint8_t* x, hn::Vec<Int32s>& sums, hn::Vec<Int32s>& other) {
  const auto& pair = *reinterpret_cast<const std::int32_t*>(x);
#if HWY_TARGET <= HWY_AVX3_DL
  // Highway multiplies and adds in two instructions, and loads the pair in one more.
  static_cast<void>(other);
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums.raw) : "v"(values.raw), "m"(pair));
#else
  const auto inputs = hn::BitCast(Int16s(), hn::Set(Int32s(), pair));
  sums = hn::ReorderWidenMulAccumulate(Int32s(), values, inputs, sums, other);
#endif
}

// A panel's weights, `stride` bytes apart; its groups' scales and biases [groups][kPanel].
struct Panel {
  const std::uint8_t* packed;
  std::size_t stride;
  const float* scales;
  const float* biases;
};

template <int kWidth, Values kValues, int kRows>
HWY_NOINLINE void panel_times_rows(const Layout& layout, const Panel& panel, const std::uint8_t* HWY_RESTRICT prepared,
                                   std::size_t first, std::size_t count, float* HWY_RESTRICT out, std::size_t ldo) {
  const Floats df;
  constexpr std::size_t kVector = HWY_LANES(std::uint8_t);
  constexpr std::size_t kParts = 16 / kWidth;
  constexpr std::size_t kRowBytes = kParts * kVector;
  const std::uint8_t* x = prepared + first * kRowBytes;
  const auto* scales = reinterpret_cast<const float*>(prepared + layout.scales_offset) + first * layout.scales_stride;
  const auto* sums = reinterpret_cast<const float*>(prepared + layout.sums_offset) + first * layout.sums_stride;
  // Sums of few rows are kept in several parts, so that one need not wait for the other.
  constexpr std::size_t kChains = kRows >= 6 ? 1 : kRows >= 3 ? 2 : kParts;
  const std::size_t group_bytes = layout.group_size * kWidth / 8;

  hn::Vec<Floats> acc[kRows];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kRows; ++r) acc[r] = hn::Zero(df);
  std::size_t byte = 0;
  for (std::size_t g = 0; g < layout.groups; ++g) {
    hn::Vec<Int32s> dots[kChains][kRows];
    hn::Vec<Int32s> others[kRows];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
      others[r] = hn::Zero(Int32s());
#pragma GCC unroll 4
      for (std::size_t chain = 0; chain < kChains; ++chain) dots[chain][r] = hn::Zero(Int32s());
    }
    for (const std::size_t end = byte + group_bytes; byte < end; byte += 16) {
      alignas(kMaxVectorBytes) std::uint8_t words[4 * kVector];
      // While this panel is taken, all of the next comes.
      prefetch(panel.packed + kPanel * panel.stride + byte * kPanel, 16 * kPanel);
      load_panel(panel.packed + byte, panel.stride, words);
      const std::uint8_t* HWY_RESTRICT at = x + byte / kVector * layout.block_bytes + byte % kVector;
#pragma GCC unroll 1
      for (std::size_t word = 0; word < 4; ++word) {
        hn::Vec<Int16s> values[kParts];
        unpack<kWidth, kValues>(hn::Load(Bytes(), words + word * kVector), values);
#pragma GCC unroll 4
        for (std::size_t part = 0; part < kParts; ++part)
#pragma GCC unroll 8
          for (std::size_t r = 0; r < kRows; ++r)
            add_pair(values[part], at + r * kRowBytes + part * kVector + word * 4, dots[part % kChains][r], others[r]);
      }
    }
    const auto group_scales = hn::Load(df, panel.scales + g * kPanel);
    const auto group_biases = hn::Load(df, panel.biases + g * kPanel);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto scale = hn::Mul(group_scales, hn::Set(df, scales[r * layout.scales_stride + g]));
      auto dot = dots[0][r];
#pragma GCC unroll 4
      for (std::size_t chain = 1; chain < kChains; ++chain) dot = hn::Add(dot, dots[chain][r]);
      acc[r] = hn::MulAdd(hn::ConvertTo(df, hn::RearrangeToOddPlusEven(dot, others[r])), scale, acc[r]);
      acc[r] = hn::MulAdd(group_biases, hn::Set(df, sums[r * layout.sums_stride + g]), acc[r]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    float* to = out + (first + r) * ldo;
    if (count == kPanel) {
      hn::StoreU(acc[r], df, to);
    } else {
      alignas(kMaxVectorBytes) float buffer[kPanel];
      hn::Store(acc[r], df, buffer);
      std::copy_n(buffer, count, to);
    }
  }
}

// [kPanel][groups] → [groups, rounded up to four][kPanel]; reads up to three floats past the last.
inline void transpose_panel(const float* HWY_RESTRICT from, std::size_t groups, float* HWY_RESTRICT to) {
  for (std::size_t g = 0; g < groups; g += 4)
    load_panel(reinterpret_cast<const std::uint8_t*>(from + g), groups * sizeof(float), to + g * kPanel);
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
