// Many rows with dense weights: float32 products. Compiled once for each instruction set. Private to many_rows.cpp.
#if defined(REPRISE_KERNELS_MANY_ROWS_FLOAT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_MANY_ROWS_FLOAT_INL_H_
#undef REPRISE_KERNELS_MANY_ROWS_FLOAT_INL_H_
#else
#define REPRISE_KERNELS_MANY_ROWS_FLOAT_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "reprise/kernels/many_rows_panel-inl.h"
#include "reprise/kernels/many_rows_plan.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET <= HWY_AVX3
inline constexpr std::size_t kFloatTileRows = 8;
#else
inline constexpr std::size_t kFloatTileRows = 5;
#endif

struct FloatTile {
  const float* x;  // of the first row
  std::size_t ldx;
  const float* panel;  // [depth, kStrip]
  std::size_t depth;
  bool first;   // sums begin here
  float* sums;  // [rows, kStrip]
};

template <std::size_t kRows>
HWY_NOINLINE void multiply_float_tile(const FloatTile& tile) {
  using Vec = hn::Vec<decltype(hn::ScalableTag<float>())>;
  const float* HWY_RESTRICT panel = tile.panel;
  const float* HWY_RESTRICT x = tile.x;
  const std::size_t ldx = tile.ldx;
  Vec left[kRows];
  Vec right[kRows];
  HWY_UNROLL(16)
  for (std::size_t r = 0; r < kRows; ++r) left[r] = right[r] = hn::Zero(kFloats);
  for (std::size_t k = 0; k < tile.depth; ++k, panel += kStrip, ++x) {
    const Vec w_left = hn::Load(kFloats, panel);
    const Vec w_right = hn::Load(kFloats, panel + kLanes);
    HWY_UNROLL(16)
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vec value = hn::Set(kFloats, x[r * ldx]);
      left[r] = hn::MulAdd(w_left, value, left[r]);
      right[r] = hn::MulAdd(w_right, value, right[r]);
    }
  }
  float* HWY_RESTRICT sums = tile.sums;
  HWY_UNROLL(16)
  for (std::size_t r = 0; r < kRows; ++r, sums += kStrip) {
    if (!tile.first) {
      left[r] = hn::Add(left[r], hn::Load(kFloats, sums));
      right[r] = hn::Add(right[r], hn::Load(kFloats, sums + kLanes));
    }
    hn::Store(left[r], kFloats, sums);
    hn::Store(right[r], kFloats, sums + kLanes);
  }
}

using MultiplyFloatTile = void (*)(const FloatTile&);

template <std::size_t... kRows>
constexpr std::array<MultiplyFloatTile, sizeof...(kRows)> float_tiles_of(std::index_sequence<kRows...>) {
  return {multiply_float_tile<kRows + 1>...};
}

inline void multiply_float(const WeightView& weight, const float* x, std::size_t num_rows, std::size_t begin,
                           std::size_t end, float* out, std::size_t ldo) {
  static constexpr auto kTiles = float_tiles_of(std::make_index_sequence<kFloatTileRows>());
  const auto cols = static_cast<std::size_t>(weight.cols);
  const std::size_t rows_at_once = row_block(num_rows, cols * sizeof(float));
  const std::size_t depth_at_once = (even_part(cols, kPanelDepth / 2) + 1) / 2 * 2;
  Scratch scratch(kStrip * (depth_at_once * 3 / 2 + rows_at_once));
  float* const panel = scratch.take(depth_at_once * kStrip);
  float* const halves = scratch.take(depth_at_once / 2 * kStrip);
  float* const sums = scratch.take(rows_at_once * kStrip);
  for (std::size_t m = 0; m < num_rows; m += rows_at_once) {
    const std::size_t m_end = std::min(num_rows, m + rows_at_once);
    for (std::size_t n = begin; n < end; n += kStrip) {
      const std::size_t count = std::min(kStrip, end - n);
      const StripRows strip(weight.data, cols * size_of(weight.element), n, count);
      for (std::size_t k = 0; k < cols; k += depth_at_once) {
        const std::size_t depth = std::min(depth_at_once, cols - k);
        turn_elements(weight.element, strip, k, depth, halves, panel);
        const bool last = k + depth == cols;
        for_each_tile(m, m_end, kFloatTileRows, [&](std::size_t first, std::size_t tile_rows) {
          float* const to = out + first * ldo + (n - begin);
          if (last) prefetch_out(tile_rows, count, to, ldo);
          kTiles[tile_rows - 1]({x + first * cols + k, cols, panel, depth, k == 0, sums + (first - m) * kStrip});
          if (last) write_out(sums + (first - m) * kStrip, tile_rows, count, to, ldo);
        });
      }
    }
  }
}

}  // namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // REPRISE_KERNELS_MANY_ROWS_FLOAT_INL_H_
