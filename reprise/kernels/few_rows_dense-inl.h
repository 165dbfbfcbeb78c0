// Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_DENSE_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_DENSE_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_DENSE_INL_H_
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

// Rows [first, first + kRows) times `count` (at most four) columns from weight row `n` on.
template <typename T, int kRows>
HWY_NOINLINE void dense_quad(const Layout& layout, const std::uint8_t* weight, std::size_t n, std::size_t count,
                             const std::uint8_t* prepared, std::size_t first, float* out, std::size_t ldo) {
  const Floats df;
  constexpr std::size_t kLanes = HWY_LANES(float);
  // As many sums as registers hold.
  constexpr int kColumns = kRows >= 4 ? 1 : kRows >= 2 ? 2 : 4;
  const std::size_t column_bytes = layout.cols * sizeof(T);
  const std::size_t ahead = bytes_ahead(column_bytes);
  const std::size_t whole = layout.cols / kLanes * kLanes;
  alignas(kMaxVectorBytes) float sums[kQuad * kRows * kLanes];
  for (std::size_t column = 0; column < kQuad; column += kColumns) {
    const std::uint8_t* from[kColumns];
    for (std::size_t c = 0; c < kColumns; ++c) from[c] = weight + (n + std::min(column + c, count - 1)) * column_bytes;
    hn::Vec<Floats> acc[kColumns][kRows];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[c][r] = hn::Zero(df);
    const auto* x = reinterpret_cast<const float*>(prepared + first * layout.row_bytes);
    const std::size_t x_stride = layout.row_bytes / sizeof(float);
    for (std::size_t k = 0; k < whole; k += kLanes) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const std::uint8_t* at = from[c] + k * sizeof(T);
        hwy::Prefetch(at + ahead);
        const auto w = load_floats<T>(at);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          acc[c][r] = hn::MulAdd(w, hn::Load(df, x + static_cast<std::size_t>(r) * x_stride + k), acc[c][r]);
      }
    }
    if (whole < layout.cols) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        alignas(kMaxVectorBytes) std::uint8_t rest[kMaxVectorBytes] = {};
        std::memcpy(rest, from[c] + whole * sizeof(T), (layout.cols - whole) * sizeof(T));
        const auto w = load_floats<T>(rest);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          acc[c][r] = hn::MulAdd(w, hn::Load(df, x + static_cast<std::size_t>(r) * x_stride + whole), acc[c][r]);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        hn::Store(acc[c][r], df,
                  sums + ((column + static_cast<std::size_t>(c)) * kRows + static_cast<std::size_t>(r)) * kLanes);
  }
  for (std::size_t r = 0; r < kRows; ++r)
    store_quad(hn::Load(df, sums + r * kLanes), hn::Load(df, sums + (kRows + r) * kLanes),
               hn::Load(df, sums + (2 * kRows + r) * kLanes), hn::Load(df, sums + (3 * kRows + r) * kLanes), count,
               out + (first + r) * ldo);
}

template <typename T>
void multiply_dense(const WeightView& weight, const Layout& layout, int num_rows, const std::uint8_t* prepared,
                    int begin, int end, float* out, std::size_t ldo) {
  const auto* data = static_cast<const std::uint8_t*>(weight.data);
  const auto last = static_cast<std::size_t>(end);
  for (auto n = static_cast<std::size_t>(begin); n < last; n += kQuad) {
    const std::size_t count = std::min(kQuad, last - n);
    float* to = out + (n - static_cast<std::size_t>(begin));
    for_tiles(std::integer_sequence<int, 8, 4, 2, 1>(), num_rows, [&](auto rows, std::size_t first) {
      dense_quad<T, rows>(layout, data, n, count, prepared, first, to, ldo);
    });
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
