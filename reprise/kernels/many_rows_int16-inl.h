// Many rows with quantised weights: int16 products, summed exactly in int32 within a group. Compiled once for each
// instruction set. Private to many_rows.cpp.
//
// Numbers of a block of 32 along k are taken in pairs (i, i + 16), which cost least to unpack; inputs are prepared so.
// With groups of 16, pairs are (i, i + 8) within a group.
#if defined(REPRISE_KERNELS_MANY_ROWS_INT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_MANY_ROWS_INT16_INL_H_
#undef REPRISE_KERNELS_MANY_ROWS_INT16_INL_H_
#else
#define REPRISE_KERNELS_MANY_ROWS_INT16_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "reprise/kernels/many_rows_panel-inl.h"
#include "reprise/kernels/many_rows_plan.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr hn::ScalableTag<std::int32_t> kInts;
using Floats = hn::Vec<hn::ScalableTag<float>>;
using Ints = hn::Vec<hn::ScalableTag<std::int32_t>>;
using WordVec = hn::Vec<hn::ScalableTag<std::uint32_t>>;

inline constexpr std::size_t kBlock =
    32;  // along k: all widths fill whole words, and groups of 32 and more whole blocks
inline constexpr std::size_t kPairs = kBlock / 2;

// ---- Inputs

// Pairs are kApart numbers apart.
template <std::size_t kApart>
void prepare_pairs(const Int16Rows& rows, std::size_t group, const float* x, std::size_t ldx, std::size_t begin,
                   std::size_t end) {
  constexpr hn::CappedTag<float, kApart> floats;
  constexpr hn::RebindToSigned<decltype(floats)> ints;
  const std::size_t lanes = hn::Lanes(floats);
  for (std::size_t m = begin; m < end; ++m) {
    const float* row = x + m * ldx;
    std::int32_t* pairs = rows.pairs + m * rows.pairs_per_row;
    for (std::size_t g = 0; g < rows.groups; ++g, row += group, pairs += group / 2) {
      // Magnitudes compared as integers: NaN is above infinity, and infinity above all else.
      auto largest = hn::Zero(ints);
      for (std::size_t k = 0; k < group; k += lanes) {
        largest = hn::Max(largest, hn::BitCast(ints, hn::Abs(hn::LoadU(floats, row + k))));
      }
      const float magnitude = hn::GetLane(hn::BitCast(floats, hn::MaxOfLanes(ints, largest)));
      if (!(magnitude <= std::numeric_limits<float>::max())) {
        std::fill_n(pairs, group / 2, 0);
        rows.scales[m * rows.groups + g] = rows.sums[m * rows.groups + g] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      constexpr float kLevels = 32767.0F;
      const bool zero = magnitude < 1e-30F;  // what is smaller has no finite inverse
      const float scale = zero ? 0.0F : magnitude * (1.0F / kLevels);
      const float inverse = zero ? 0.0F : kLevels / magnitude;
      // Added to 1.5 · 2^23, a number is rounded to an integer, which the lower bits hold.
      constexpr std::uint32_t kRounderBits = 0x4b400000U;
      const auto rounder = hn::BitCast(floats, hn::Set(ints, static_cast<std::int32_t>(kRounderBits)));
      const auto factor = hn::Set(floats, inverse);
      auto sum = hn::Zero(ints);
      for (std::size_t k = 0; k < group; k += 2 * kApart) {
        for (std::size_t i = 0; i < kApart; i += lanes) {
          const auto low = hn::BitCast(ints, hn::MulAdd(hn::LoadU(floats, row + k + i), factor, rounder));
          const auto high = hn::BitCast(ints, hn::MulAdd(hn::LoadU(floats, row + k + kApart + i), factor, rounder));
          sum = hn::Add(sum, hn::Add(low, high));
          hn::StoreU(hn::Or(hn::And(low, hn::Set(ints, 0xffff)), hn::ShiftLeft<16>(high)), ints, pairs + k / 2 + i);
        }
      }
      // Lanes have been added modulo 2^32.
      const auto rounders = static_cast<std::uint32_t>(group / lanes) * kRounderBits;
      sum = hn::Sub(sum, hn::Set(ints, static_cast<std::int32_t>(rounders)));
      const auto total = static_cast<float>(hn::GetLane(hn::SumOfLanes(ints, sum)));
      rows.scales[m * rows.groups + g] = scale;
      rows.sums[m * rows.groups + g] = scale * total;
    }
  }
}

inline void prepare_int16(const Int16Rows& rows, std::size_t group, const float* x, std::size_t ldx, std::size_t begin,
                          std::size_t end) {
  if (group == 16) {
    prepare_pairs<8>(rows, group, x, ldx, begin, end);
  } else {
    prepare_pairs<kPairs>(rows, group, x, ldx, begin, end);
  }
}

// ---- Weights

// What a weight's bits stand for.
enum class Values { numbers, e2m1 };

// The 16 pairs of one block of 32 from its `kBits` words. Pairs are kApart numbers apart.
template <int kBits, Values kValues, std::size_t kApart>
HWY_INLINE void unpack_block(const float* words, std::int32_t* pairs) {
  const auto word = [&](std::size_t i) { return hn::BitCast(kWords, hn::Load(kFloats, words + i * kStrip)); };
  const auto store = [&](std::size_t i, WordVec v) HWY_ATTR {
    if constexpr (kValues == Values::e2m1) {
      const hn::Repartition<std::uint8_t, decltype(kWords)> bytes;
      const auto values = hn::TableLookupBytes(hn::LoadDup128(bytes, kE2m1Raised), hn::BitCast(bytes, v));
      v = hn::And(hn::BitCast(kWords, values), hn::Set(kWords, 0x00ff00ffU));
    }
    hn::Store(hn::BitCast(kInts, v), kInts, pairs + i * kStrip);
  };
  if constexpr (kApart == kPairs && (kBits == 2 || kBits == 4 || kBits == 8)) {
    constexpr std::size_t kPerHalf = 16 / kBits;
    const auto mask = hn::Set(kWords, ((1U << kBits) - 1) * 0x10001U);
    const auto low_half = hn::Set(kWords, 0xffffU);
    HWY_UNROLL(4)
    for (std::size_t j = 0; j < kBits / 2; ++j) {
      const auto a = word(j);
      const auto b = word(j + kBits / 2);
      auto low = hn::Or(hn::And(a, low_half), hn::ShiftLeft<16>(b));
      auto high = hn::Or(hn::ShiftRight<16>(a), hn::AndNot(low_half, b));
      HWY_UNROLL(8)
      for (std::size_t i = 0; i < kPerHalf; ++i) {
        store(2 * j * kPerHalf + i, hn::And(low, mask));
        store((2 * j + 1) * kPerHalf + i, hn::And(high, mask));
        low = hn::ShiftRight<kBits>(low);
        high = hn::ShiftRight<kBits>(high);
      }
    }
  } else {
    const auto mask = hn::Set(kWords, (1U << kBits) - 1);
    const auto value = [&](std::size_t i) {
      const std::size_t bit = i * kBits;
      const int shift = static_cast<int>(bit % 32);
      auto v = hn::ShiftRightSame(word(bit / 32), shift);
      if (shift + kBits > 32) v = hn::Or(v, hn::ShiftLeftSame(word(bit / 32 + 1), 32 - shift));
      return hn::And(v, mask);
    };
    HWY_UNROLL(16)
    for (std::size_t i = 0; i < kPairs; ++i) {
      const std::size_t first = i / kApart * 2 * kApart + i % kApart;
      store(i, hn::Or(value(first), hn::ShiftLeft<16>(value(first + kApart))));
    }
  }
}

template <int kBits, std::size_t kApart, Values kValues = Values::numbers>
HWY_NOINLINE void unpack_blocks(const float* words, std::size_t blocks, std::int32_t* pairs) {
  for (std::size_t i = 0; i < blocks; ++i, words += kBits * kStrip, pairs += kPairs * kStrip) {
    for (std::size_t v = 0; v < kStrip; v += kLanes) unpack_block<kBits, kValues, kApart>(words + v, pairs + v);
  }
}

template <std::size_t kApart>
void unpack_blocks_apart(const WeightView& weight, const float* words, std::size_t blocks, std::int32_t* pairs) {
  switch (weight.bits) {
    case 2:
      return unpack_blocks<2, kApart>(words, blocks, pairs);
    case 3:
      return unpack_blocks<3, kApart>(words, blocks, pairs);
    case 4:
      return unpack_blocks<4, kApart>(words, blocks, pairs);
    case 5:
      return unpack_blocks<5, kApart>(words, blocks, pairs);
    case 6:
      return unpack_blocks<6, kApart>(words, blocks, pairs);
    default:
      return unpack_blocks<8, kApart>(words, blocks, pairs);
  }
}

// The scales and biases of a strip's groups [groups, kStrip]. `halves` has as much room as half of `scales`.
inline void turn_scales(const WeightView& weight, std::size_t first, std::size_t count, std::size_t groups,
                        float* halves, float* scales, float* biases) {
  const StripRows scale_rows(weight.scales, groups * size_of(weight.element), first, count);
  if (!is_e2m1(weight)) {
    turn_elements(weight.element, scale_rows, 0, groups, halves, scales);
    turn_elements(weight.element, StripRows(weight.biases, groups * size_of(weight.element), first, count), 0, groups,
                  halves, biases);
    return;
  }
  for (std::size_t g = 0; g < groups; ++g) {
    for (std::size_t n = 0; n < kStrip; ++n) {
      const float scale = 0.5F * element_at(Element::e8m0, scale_rows.at[n], g);
      scales[g * kStrip + n] = scale;
      biases[g * kStrip + n] = -kE2m1Zero * scale;
    }
  }
}

inline void unpack_blocks(const WeightView& weight, const float* words, std::size_t blocks, std::int32_t* pairs) {
  if (is_e2m1(weight)) return unpack_blocks<4, kPairs, Values::e2m1>(words, blocks, pairs);
  if (weight.group_size == 16) return unpack_blocks_apart<8>(weight, words, blocks, pairs);
  unpack_blocks_apart<kPairs>(weight, words, blocks, pairs);
}

// ---- Products

// sum += a0 · b0 + a1 · b1 for the pairs of int16 in each lane; `more` takes what the instruction set puts elsewhere.
// The compiler is told where sums lie, since GCC 12 copies them around, and spills them.
HWY_INLINE void add_products(Ints a, Ints b, Ints& sum, [[maybe_unused]] Ints& more) {
#if HWY_TARGET == HWY_AVX3_DL
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));  // Highway multiplies and adds in two
#elif HWY_TARGET == HWY_AVX3
  asm("vpaddd %1, %0, %0" : "+v"(sum.raw) : "v"(_mm512_madd_epi16(a.raw, b.raw)));
#elif HWY_TARGET == HWY_AVX2
  asm("vpaddd %1, %0, %0" : "+x"(sum.raw) : "x"(_mm256_madd_epi16(a.raw, b.raw)));
#else
  const hn::Repartition<std::int16_t, decltype(kInts)> shorts;
  sum = hn::ReorderWidenMulAccumulate(kInts, hn::BitCast(shorts, a), hn::BitCast(shorts, b), sum, more);
#if HWY_ARCH_X86
  asm volatile("" : "+x"(sum.raw));
#endif
#endif
}

// Vectors of sums fill the registers: 32 with AVX-512 and NEON (which needs two a sum), else 16.
#if HWY_TARGET <= HWY_AVX3
inline constexpr std::size_t kTileRows = 8;
#else
inline constexpr std::size_t kTileRows = 5;
#endif

struct Int16Tile {
  const std::int32_t* pairs;  // of the first row
  std::size_t pairs_per_row;
  const float* row_scales;  // [rows, groups_per_row]
  const float* row_sums;
  std::size_t groups_per_row;
  const std::int32_t* panel;  // [groups · pairs_per_group, kStrip]
  const float* scales;        // [groups, kStrip]
  const float* biases;
  std::size_t groups;
  std::size_t pairs_per_group;
  bool first;   // sums begin here
  float* sums;  // [rows, kStrip]
  Ahead& ahead;
  std::size_t lines;  // of `ahead`, for each group
};

template <std::size_t kRows>
HWY_NOINLINE void multiply_tile(const Int16Tile& tile) {
  const std::int32_t* HWY_RESTRICT panel = tile.panel;
  const std::int32_t* HWY_RESTRICT x = tile.pairs;
  const std::size_t stride = tile.pairs_per_row;
  const std::size_t pairs_per_group = tile.pairs_per_group;
  float* HWY_RESTRICT sums = tile.sums;
  for (std::size_t g = 0; g < tile.groups; ++g) {
    tile.ahead.step(tile.lines);
    Ints left[kRows];
    Ints right[kRows];
    Ints more_left[kRows];
    Ints more_right[kRows];
    HWY_UNROLL(16)
    for (std::size_t r = 0; r < kRows; ++r) left[r] = right[r] = more_left[r] = more_right[r] = hn::Zero(kInts);
    for (std::size_t k = 0; k < pairs_per_group; ++k, panel += kStrip, ++x) {
      const Ints w_left = hn::Load(kInts, panel);
      const Ints w_right = hn::Load(kInts, panel + kLanes);
      HWY_UNROLL(16)
      for (std::size_t r = 0; r < kRows; ++r) {
        const Ints pair = hn::Set(kInts, x[r * stride]);
        add_products(w_left, pair, left[r], more_left[r]);
        add_products(w_right, pair, right[r], more_right[r]);
      }
    }
    const Floats scale_left = hn::Load(kFloats, tile.scales + g * kStrip);
    const Floats scale_right = hn::Load(kFloats, tile.scales + g * kStrip + kLanes);
    const Floats bias_left = hn::Load(kFloats, tile.biases + g * kStrip);
    const Floats bias_right = hn::Load(kFloats, tile.biases + g * kStrip + kLanes);
    const bool first = tile.first && g == 0;
    HWY_UNROLL(16)
    for (std::size_t r = 0; r < kRows; ++r) {
      const Floats scale = hn::Set(kFloats, tile.row_scales[r * tile.groups_per_row + g]);
      const Floats sum = hn::Set(kFloats, tile.row_sums[r * tile.groups_per_row + g]);
      float* to = sums + r * kStrip;
      const auto add = [&](Ints exact, Ints more, Floats w_scale, Floats w_bias, float* at) HWY_ATTR {
        const Floats value = hn::ConvertTo(kFloats, hn::RearrangeToOddPlusEven(exact, more));
        const Floats before = first ? hn::Zero(kFloats) : hn::Load(kFloats, at);
        hn::Store(hn::MulAdd(value, hn::Mul(w_scale, scale), hn::MulAdd(w_bias, sum, before)), kFloats, at);
      };
      add(left[r], more_left[r], scale_left, bias_left, to);
      add(right[r], more_right[r], scale_right, bias_right, to + kLanes);
    }
  }
}

using MultiplyTile = void (*)(const Int16Tile&);

template <std::size_t... kRows>
constexpr std::array<MultiplyTile, sizeof...(kRows)> tiles_of(std::index_sequence<kRows...>) {
  return {multiply_tile<kRows + 1>...};
}

inline void multiply_int16(const WeightView& weight, const Int16Rows& rows, std::size_t num_rows, std::size_t begin,
                           std::size_t end, float* out, std::size_t ldo) {
  static constexpr auto kTiles = tiles_of(std::make_index_sequence<kTileRows>());
  const auto cols = static_cast<std::size_t>(weight.cols);
  const auto bits = static_cast<std::size_t>(weight.bits);
  const auto group = static_cast<std::size_t>(weight.group_size);
  const std::size_t rows_at_once = row_block(num_rows, cols * sizeof(std::int16_t));
  // Of groups of 16 an even number, which fills whole blocks.
  const std::size_t together = group < kBlock ? kBlock / group : 1;
  const std::size_t groups_at_once =
      together * even_part(rows.groups / together, std::max<std::size_t>(1, kPanelDepth / group / together));
  const std::size_t blocks_at_once = groups_at_once * group / kBlock;

  Scratch scratch(kStrip * (blocks_at_once * (bits + kPairs) + 2 * rows.groups + rows.groups / 2 + rows_at_once));
  float* const words = scratch.take(blocks_at_once * bits * kStrip);
  auto* const panel = reinterpret_cast<std::int32_t*>(scratch.take(blocks_at_once * kPairs * kStrip));
  float* const scales = scratch.take(rows.groups * kStrip);
  float* const biases = scratch.take(rows.groups * kStrip);
  float* const halves = scratch.take(rows.groups / 2 * kStrip);
  float* const sums = scratch.take(rows_at_once * kStrip);

  const std::size_t row_bytes = cols * bits / 8;
  const std::size_t element = size_of(weight.element);
  const auto strip_of = [&](const void* data, std::size_t bytes, std::size_t n) {
    return StripRows(data, bytes, n, std::min(kStrip, end - n));
  };
  const auto ahead_of = [&](std::size_t n) {
    Ahead ahead;
    if (n >= end) return ahead;
    const std::size_t count = std::min(kStrip, end - n);
    const StripRows packed = strip_of(weight.data, row_bytes, n);
    ahead.add(strip_of(weight.scales, rows.groups * element, n).at[0], count * rows.groups * element);
    if (weight.biases != nullptr) {
      ahead.add(strip_of(weight.biases, rows.groups * element, n).at[0], count * rows.groups * element);
    }
    ahead.add(packed.at[0], count * row_bytes);
    return ahead;
  };

  for (std::size_t m = 0; m < num_rows; m += rows_at_once) {
    const std::size_t m_end = std::min(num_rows, m + rows_at_once);
    for (std::size_t n = begin; n < end; n += kStrip) {
      const std::size_t count = std::min(kStrip, end - n);
      turn_scales(weight, n, count, rows.groups, halves, scales, biases);
      Ahead ahead = ahead_of(n + kStrip);
      const std::size_t lines = ahead.lines_per_step((m_end - m + kTileRows - 1) / kTileRows * rows.groups);
      const StripRows packed = strip_of(weight.data, row_bytes, n);
      for (std::size_t g = 0; g < rows.groups; g += groups_at_once) {
        const std::size_t groups = std::min(groups_at_once, rows.groups - g);
        const std::size_t blocks = groups * group / kBlock;
        turn_words(packed, g * group * bits / 8, blocks * bits, words);
        unpack_blocks(weight, words, blocks, panel);
        const bool last = g + groups == rows.groups;
        for_each_tile(m, m_end, kTileRows, [&](std::size_t first, std::size_t tile_rows) {
          float* const to = out + first * ldo + (n - begin);
          if (last) prefetch_out(tile_rows, count, to, ldo);
          kTiles[tile_rows - 1]({rows.pairs + first * rows.pairs_per_row + g * group / 2, rows.pairs_per_row,
                                 rows.scales + first * rows.groups + g, rows.sums + first * rows.groups + g,
                                 rows.groups, panel, scales + g * kStrip, biases + g * kStrip, groups, group / 2,
                                 g == 0, sums + (first - m) * kStrip, ahead, lines});
          if (last) write_out(sums + (first - m) * kStrip, tile_rows, count, to, ldo);
        });
      }
    }
  }
}

}  // namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REPRISE_KERNELS_MANY_ROWS_INT16_INL_H_
