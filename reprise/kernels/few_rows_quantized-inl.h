// Quantised weights: which kernel takes them, and what it gets. Compiled once for each instruction set, see
// few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_QUANTIZED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_QUANTIZED_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_QUANTIZED_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_QUANTIZED_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "reprise/kernels/few_rows_bytes-inl.h"
#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_one-inl.h"
#include "reprise/kernels/few_rows_several-inl.h"
#include "reprise/kernels/few_rows_vectors-inl.h"
#include "reprise/kernels/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The weight's rows from `first` on, in the width in which they are multiplied.
struct Rows {
  const std::uint8_t* data;
  std::size_t stride;
  std::size_t bytes;
};

class RowsOf {
 public:
  explicit RowsOf(const WeightView& weight)
      : data_(static_cast<const std::uint8_t*>(weight.data)),
        stride_(static_cast<std::size_t>(weight.cols) * static_cast<std::size_t>(weight.bits) / 8),
        bits_(weight.bits),
        bytes_(round_up(static_cast<std::size_t>(weight.cols), kMaxVectorBytes)) {
    if (needs_bytes()) tables_.emplace(weight.bits);
  }

  bool needs_bytes() const { return bits_ != width_of(bits_); }
  std::size_t buffer_bytes(std::size_t count) const { return count * bytes_; }

  // Rows [first, first + count). `buffer` has room for them as bytes.
  Rows operator()(std::size_t first, std::size_t count, std::uint8_t* buffer) const {
    const std::uint8_t* data = data_ + first * stride_;
    if (!needs_bytes()) return {data, stride_, stride_};
    for (std::size_t row = 0; row < count; ++row)
      unpack_bytes(bits_, *tables_, data + row * stride_, stride_, bytes_, buffer + row * bytes_);
    return {buffer, bytes_, bytes_};
  }

 private:
  const std::uint8_t* data_;
  std::size_t stride_;
  int bits_;
  std::size_t bytes_;
  std::optional<ByteTables> tables_;
};

// count · groups floats times the row's scales, which begin again after each `groups` of them and can be read as
// vectors from each.
inline void multiply_by_scales(float* HWY_RESTRICT values, std::size_t count, std::size_t groups,
                               const float* HWY_RESTRICT scales) {
  const Floats d;
  std::size_t group = 0;
  for (std::size_t i = 0; i < count * groups; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(hn::LoadU(d, values + i), hn::LoadU(d, scales + group)), d, values + i);
    group += hn::Lanes(d);
    while (group >= groups) group -= groups;
  }
}

// Asks for scales and biases that are needed soon.
inline void prefetch_next(const WeightView& weight, std::size_t first, std::size_t count) {
  const std::size_t size = size_of(weight.element);
  prefetch(static_cast<const std::uint8_t*>(weight.scales) + first * size, count * size);
  if (weight.biases != nullptr && !weight.centred)
    prefetch(static_cast<const std::uint8_t*>(weight.biases) + first * size, count * size);
}

template <int kWidth, Values kValues>
void multiply_one(const WeightView& weight, const Layout& layout, const std::uint8_t* prepared, std::size_t begin,
                  std::size_t end, float* out) {
  const std::size_t groups = layout.groups;
  // Few columns at a time, so that their scales and biases are floats in the first cache.
  constexpr std::size_t kGroupsAtOnce = 1536;
  const std::size_t at_once = std::clamp<std::size_t>(kGroupsAtOnce / groups / kQuad * kQuad, kQuad, 32);
  const std::size_t room = round_up(at_once * groups + 2 * kMaxLanes, kMaxLanes);
  const RowsOf rows_of(weight);
  const std::size_t bytes = rows_of.needs_bytes() ? rows_of.buffer_bytes(at_once) : 0;
  auto* scales = static_cast<float*>(scratch(2 * room * sizeof(float) + bytes));
  float* biases = scales + room;
  auto* buffer = reinterpret_cast<std::uint8_t*>(biases + room);
  const auto* row_scales = reinterpret_cast<const float*>(prepared + layout.scales_offset);
  for (std::size_t n = begin; n < end; n += at_once) {
    const std::size_t count = std::min(at_once, end - n);
    scales_of(weight, n * groups, count * groups, scales);
    biases_of(weight, n * groups, count * groups, biases);
    prefetch_next(weight, (n + count) * groups, at_once * groups);
    multiply_by_scales(scales, count, groups, row_scales);
    // The last column's last vector may hold groups past its end: products of zeros, which stay zeros only times
    // numbers.
    std::fill_n(scales + count * groups, kMaxLanes, 0.0F);
    const Rows rows = rows_of(n, count, buffer);
    const Columns columns{rows.data, rows.stride, rows.bytes, scales, biases, count};
    if constexpr (kWidth == 8) {
      if (layout.group_size == 16) {
        columns_times_row<8, kValues, 16>(layout, columns, prepared, out + (n - begin));
        continue;
      }
    }
    columns_times_row<kWidth, kValues, 32>(layout, columns, prepared, out + (n - begin));
  }
}

template <int kWidth, Values kValues>
void multiply_several(const WeightView& weight, const Layout& layout, int num_rows, const std::uint8_t* prepared,
                      std::size_t begin, std::size_t end, float* out, std::size_t ldo) {
  const std::size_t groups = layout.groups;
  const std::size_t room = kPanel * round_up(groups + 4, kMaxLanes);
  const RowsOf rows_of(weight);
  auto* floats = static_cast<float*>(scratch(3 * room * sizeof(float) + rows_of.buffer_bytes(kPanel)));
  float* scales = floats + room;
  float* biases = scales + room;
  auto* buffer = reinterpret_cast<std::uint8_t*>(biases + room);
  for (std::size_t n = begin; n < end; n += kPanel) {
    const std::size_t count = std::min(kPanel, end - n);
    scales_of(weight, n * groups, count * groups, floats);
    transpose_panel(floats, groups, scales);
    biases_of(weight, n * groups, count * groups, floats);
    transpose_panel(floats, groups, biases);
    prefetch_next(weight, (n + count) * groups, kPanel * groups);
    Rows rows = rows_of(n, count, buffer);
    if (count < kPanel && rows.data != buffer) {
      for (std::size_t row = 0; row < count; ++row)
        std::memcpy(buffer + row * rows.stride, rows.data + row * rows.stride, rows.bytes);
      rows.data = buffer;
    }
    for_tiles(SeveralTiles(), num_rows, [&](auto tile, std::size_t first) {
      panel_times_rows<kWidth, kValues, tile>(layout, {rows.data, rows.stride, scales, biases}, prepared, first, count,
                                              out + (n - begin), ldo);
    });
  }
}

template <int kWidth, Values kValues>
void multiply_quantized(const WeightView& weight, const Layout& layout, int num_rows, const std::uint8_t* prepared,
                        int begin, int end, float* out, std::size_t ldo) {
  if (num_rows == 1) {
    multiply_one<kWidth, kValues>(weight, layout, prepared, static_cast<std::size_t>(begin),
                                  static_cast<std::size_t>(end), out);
  } else {
    multiply_several<kWidth, kValues>(weight, layout, num_rows, prepared, static_cast<std::size_t>(begin),
                                      static_cast<std::size_t>(end), out, ldo);
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
