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

inline constexpr hn::Full128<float> kFour;
using Four = hn::Vec<hn::Full128<float>>;

// How four units beside each other become four words, and one becomes one. Unit sizes: 4, 4, 2, 2 bytes.
struct Words {
  static constexpr std::size_t kBytes = 4;
  static HWY_INLINE Four four(const std::uint8_t* p) {
    return hn::BitCast(kFour, hn::LoadU(hn::Full128<std::uint8_t>(), p));
  }
  static float one(const std::uint8_t* p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
};
struct Brains {
  static constexpr std::size_t kBytes = 2;
  static HWY_INLINE Four four(const std::uint8_t* p) {
    const hn::Full64<std::uint8_t> bytes;
    const hn::Rebind<std::uint16_t, hn::Full128<float>> shorts;
    const hn::Full128<std::uint32_t> words;
    return hn::BitCast(kFour, hn::ShiftLeft<16>(hn::PromoteTo(words, hn::BitCast(shorts, hn::LoadU(bytes, p)))));
  }
  static float one(const std::uint8_t* p) { return element_at(Element::bf16, p, 0); }
};
struct Halves {
  static constexpr std::size_t kBytes = 2;
  static HWY_INLINE Four four(const std::uint8_t* p) {
    const hn::Full64<std::uint8_t> bytes;
    const hn::Rebind<hwy::float16_t, hn::Full128<float>> halves;
    return hn::PromoteTo(kFour, hn::BitCast(halves, hn::LoadU(bytes, p)));
  }
  static float one(const std::uint8_t* p) { return element_at(Element::f16, p, 0); }
};

// out[i * kStrip + n] = unit first + i of the strip's row n, i < count.
template <typename Unit>
HWY_NOINLINE void turn(const StripRows& rows, std::size_t first, std::size_t count, float* out) {
  const hn::RepartitionToWide<decltype(kFour)> wide;
  for (std::size_t n = 0; n < kStrip; n += 4) {
    const std::uint8_t* row[4];
    for (std::size_t i = 0; i < 4; ++i) row[i] = rows.at[n + i] + first * Unit::kBytes;
    float* to = out + n;
    std::size_t k = 0;
    for (; k + 4 <= count; k += 4, to += 4 * kStrip) {
      const Four a = Unit::four(row[0] + k * Unit::kBytes);
      const Four b = Unit::four(row[1] + k * Unit::kBytes);
      const Four c = Unit::four(row[2] + k * Unit::kBytes);
      const Four d = Unit::four(row[3] + k * Unit::kBytes);
      const auto ab_low = hn::BitCast(wide, hn::InterleaveLower(kFour, a, b));
      const auto ab_high = hn::BitCast(wide, hn::InterleaveUpper(kFour, a, b));
      const auto cd_low = hn::BitCast(wide, hn::InterleaveLower(kFour, c, d));
      const auto cd_high = hn::BitCast(wide, hn::InterleaveUpper(kFour, c, d));
      hn::StoreU(hn::BitCast(kFour, hn::InterleaveLower(wide, ab_low, cd_low)), kFour, to);
      hn::StoreU(hn::BitCast(kFour, hn::InterleaveUpper(wide, ab_low, cd_low)), kFour, to + kStrip);
      hn::StoreU(hn::BitCast(kFour, hn::InterleaveLower(wide, ab_high, cd_high)), kFour, to + 2 * kStrip);
      hn::StoreU(hn::BitCast(kFour, hn::InterleaveUpper(wide, ab_high, cd_high)), kFour, to + 3 * kStrip);
    }
    for (; k < count; ++k, to += kStrip) {
      for (std::size_t i = 0; i < 4; ++i) to[i] = Unit::one(row[i] + k * Unit::kBytes);
    }
  }
}

inline void turn_elements(Element element, const StripRows& rows, std::size_t first, std::size_t count, float* out) {
  switch (element) {
    case Element::f32:
      return turn<Words>(rows, first, count, out);
    case Element::f16:
      return turn<Halves>(rows, first, count, out);
    case Element::bf16:
      return turn<Brains>(rows, first, count, out);
  }
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
