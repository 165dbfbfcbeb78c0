// Panels: a block of a weight's rows (output columns) turned so that columns lie side by side. Compiled once for each
// instruction set. Private to many_rows.cpp.
#if defined(REPRISE_KERNELS_MANY_ROWS_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_MANY_ROWS_PANEL_INL_H_
#undef REPRISE_KERNELS_MANY_ROWS_PANEL_INL_H_
#else
#define REPRISE_KERNELS_MANY_ROWS_PANEL_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "reprise/kernels/cpu.h"
#include "reprise/kernels/unpack.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A strip is the output columns of one tile: two vectors of lanes.
inline constexpr hn::ScalableTag<float> kFloats;
inline constexpr hn::ScalableTag<std::uint32_t> kWords;
inline constexpr std::size_t kLanes = hn::MaxLanes(kFloats);
inline constexpr std::size_t kStrip = 2 * kLanes;

// Where the rows of one strip begin; columns past the matrix stand for its last one, and their results are not kept.
struct StripRows {
  const std::uint8_t* at[kStrip];

  StripRows(const void* data, std::size_t row_bytes, std::size_t first, std::size_t count) {
    for (std::size_t i = 0; i < kStrip; ++i) {
      at[i] = static_cast<const std::uint8_t*>(data) + (first + (i < count ? i : count - 1)) * row_bytes;
    }
  }
};

// Asks the memory for what the next strip needs, a few lines at a time, while this one is multiplied: all at once would
// keep the multiplication waiting.
class Ahead {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::uint8_t*>(data);
    ranges_[added_++] = {begin, begin + bytes};
    lines_ += bytes / kLine + 1;
  }
  // Lines of which each of so many steps must take its part.
  std::size_t lines_per_step(std::size_t steps) const { return (lines_ + steps - 1) / steps; }

  void step(std::size_t lines) {
    while (lines > 0 && taken_ < added_) {
      Range& range = ranges_[taken_];
      for (; lines > 0 && range.next < range.end; --lines, range.next += kLine) __builtin_prefetch(range.next, 0, 2);
      if (range.next >= range.end) ++taken_;
    }
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Range {
    const std::uint8_t* next;
    const std::uint8_t* end;
  };
  Range ranges_[3] = {};
  std::size_t added_ = 0;
  std::size_t taken_ = 0;
  std::size_t lines_ = 0;
};

// Four words of each of four rows are turned in 128 bits; two such squares at once where vectors have 256.
inline constexpr hn::CappedTag<float, 8> kSquares;
inline constexpr std::size_t kSquareColumns = hn::MaxLanes(kSquares);

// Four words of row 0 and, in twice as wide vectors, beside them those of row 4.
template <class D>
HWY_INLINE hn::Vec<D> load_squares(D squares, const std::uint8_t* const* rows, std::size_t byte) {
  const hn::Full128<std::uint8_t> bytes;
  const hn::Full128<float> four;
  const auto first = hn::BitCast(four, hn::LoadU(bytes, rows[0] + byte));
  if constexpr (hn::MaxLanes(squares) == 4) {
    return first;
  } else {
    return hn::Combine(squares, hn::BitCast(four, hn::LoadU(bytes, rows[4] + byte)), first);
  }
}

// out[i * kStrip + n] = the 32-bit word at byte `first` + 4 · i of the strip's row n, i < count.
HWY_NOINLINE void turn_words(const StripRows& strip, std::size_t first, std::size_t count, float* out) {
  const hn::RepartitionToWide<decltype(kSquares)> wide;
  for (std::size_t n = 0; n < kStrip; n += kSquareColumns) {
    const std::uint8_t* rows[kSquareColumns];
    for (std::size_t i = 0; i < kSquareColumns; ++i) rows[i] = strip.at[n + i] + first;
    float* to = out + n;
    std::size_t k = 0;
    for (; k + 4 <= count; k += 4, to += 4 * kStrip) {
      const auto a = load_squares(kSquares, rows, k * 4);
      const auto b = load_squares(kSquares, rows + 1, k * 4);
      const auto c = load_squares(kSquares, rows + 2, k * 4);
      const auto d = load_squares(kSquares, rows + 3, k * 4);
      const auto ab_low = hn::BitCast(wide, hn::InterleaveLower(kSquares, a, b));
      const auto ab_high = hn::BitCast(wide, hn::InterleaveUpper(kSquares, a, b));
      const auto cd_low = hn::BitCast(wide, hn::InterleaveLower(kSquares, c, d));
      const auto cd_high = hn::BitCast(wide, hn::InterleaveUpper(kSquares, c, d));
      hn::StoreU(hn::BitCast(kSquares, hn::InterleaveLower(wide, ab_low, cd_low)), kSquares, to);
      hn::StoreU(hn::BitCast(kSquares, hn::InterleaveUpper(wide, ab_low, cd_low)), kSquares, to + kStrip);
      hn::StoreU(hn::BitCast(kSquares, hn::InterleaveLower(wide, ab_high, cd_high)), kSquares, to + 2 * kStrip);
      hn::StoreU(hn::BitCast(kSquares, hn::InterleaveUpper(wide, ab_high, cd_high)), kSquares, to + 3 * kStrip);
    }
    for (; k < count; ++k, to += kStrip) {
      for (std::size_t i = 0; i < kSquareColumns; ++i) std::memcpy(to + i, rows[i] + k * 4, sizeof(float));
    }
  }
}

// The float16 in the upper half of each word.
HWY_INLINE hn::Vec<decltype(kFloats)> upper_half_to_float(hn::Vec<decltype(kWords)> word) {
  const auto sign = hn::And(word, hn::Set(kWords, 0x80000000U));
  const auto rest = hn::ShiftRight<3>(hn::And(word, hn::Set(kWords, 0x7fff0000U)));
  // Scaling sets the exponent's bias right, subnormal numbers included; infinities and NaN come out as 2^16 and above.
  const auto scaled = hn::Mul(hn::BitCast(kFloats, rest), hn::Set(kFloats, 0x1p112F));
  const auto finite = hn::Lt(scaled, hn::Set(kFloats, 0x1p16F));
  const auto not_finite = hn::BitCast(kFloats, hn::Or(rest, hn::Set(kWords, 0x7f800000U)));
  return hn::Or(hn::IfThenElse(finite, scaled, not_finite), hn::BitCast(kFloats, sign));
}

// out[i * kStrip + n] = element first + i of the strip's row n, i < count. `words` has as much room as half of `out`.
// Requires: `first` even.
inline void turn_elements(Element element, const StripRows& rows, std::size_t first, std::size_t count, float* words,
                          float* out) {
  if (element == Element::f32) return turn_words(rows, first * 4, count, out);
  turn_words(rows, first * 2, count / 2, words);
  for (std::size_t i = 0; i + 2 <= count; i += 2, words += kStrip, out += 2 * kStrip) {
    for (std::size_t n = 0; n < kStrip; n += kLanes) {
      const auto both = hn::BitCast(kWords, hn::Load(kFloats, words + n));
      const auto even = hn::ShiftLeft<16>(both);
      if (element == Element::f16) {
        hn::Store(upper_half_to_float(even), kFloats, out + n);
        hn::Store(upper_half_to_float(both), kFloats, out + kStrip + n);
      } else {
        hn::Store(hn::BitCast(kFloats, even), kFloats, out + n);
        hn::Store(hn::BitCast(kFloats, hn::And(both, hn::Set(kWords, 0xffff0000U))), kFloats, out + kStrip + n);
      }
    }
  }
  if (count % 2 != 0) {
    for (std::size_t n = 0; n < kStrip; ++n) out[n] = element_at(element, rows.at[n], first + count - 1);
  }
}

// How many of `count` things to take at once, at most `most`, in even parts.
inline std::size_t even_part(std::size_t count, std::size_t most) {
  const std::size_t parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

// Rows [begin, end) in tiles of at most `most` rows, as even as they can be: tile(first, rows).
template <typename Tile>
HWY_INLINE void for_each_tile(std::size_t begin, std::size_t end, std::size_t most, Tile&& tile) {
  const std::size_t tiles = (end - begin + most - 1) / most;
  for (std::size_t i = 0; i < tiles; ++i) {
    const std::size_t first = begin + (end - begin) * i / tiles;
    tile(first, begin + (end - begin) * (i + 1) / tiles - first);
  }
}

// Asks for the memory that write_out will write.
HWY_INLINE void prefetch_out(std::size_t num_rows, std::size_t count, const float* out, std::size_t ldo) {
  for (std::size_t m = 0; m < num_rows; ++m, out += ldo) {
    for (std::size_t n = 0; n < count; n += 16) __builtin_prefetch(out + n, 1);
  }
}

// out[m * ldo + n] = sums[m * kStrip + n], n < count.
inline void write_out(const float* sums, std::size_t num_rows, std::size_t count, float* out, std::size_t ldo) {
  for (std::size_t m = 0; m < num_rows; ++m, sums += kStrip, out += ldo) {
    if (count == kStrip) {
      hn::StoreU(hn::Load(kFloats, sums), kFloats, out);
      hn::StoreU(hn::Load(kFloats, sums + kLanes), kFloats, out + kLanes);
    } else {
      std::memcpy(out, sums, count * sizeof(float));
    }
  }
}

}  // namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REPRISE_KERNELS_MANY_ROWS_PANEL_INL_H_
