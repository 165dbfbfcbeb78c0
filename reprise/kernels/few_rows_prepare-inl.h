// Compiled once for each instruction set, see few_rows.cpp. Private to `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_PREPARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_PREPARE_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_PREPARE_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_PREPARE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_vectors-inl.h"
#include "reprise/kernels/scratch.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One group: 16-bit values whose largest is ±kTop. Returns: the scale, and in `sum` the group's sum of scaled values. A
// group that holds an infinity or a NaN gets such a scale and sum.
inline float quantize_group(const float* HWY_RESTRICT x, std::size_t size, std::int16_t* HWY_RESTRICT out, float* sum) {
  // Rounded to a multiple of 256, it still has an upper byte with a sign.
  constexpr float kTop = 32639.0F;
  const Floats df;
  const Int32s di;
  const hn::Rebind<std::int16_t, Int32s> dh;
  const std::size_t lanes = hn::Lanes(df);
  // As integers, magnitudes are in order and those of NaN are the largest.
  auto largest = hn::Zero(di);
  const auto magnitude = hn::Set(di, 0x7fffffff);
  for (std::size_t k = 0; k < size; k += lanes)
    largest = hn::Max(largest, hn::And(hn::BitCast(di, hn::LoadU(df, x + k)), magnitude));
  // Below this the inverse would overflow; what is lost then is below 1e-38.
  const std::int32_t least = std::bit_cast<std::int32_t>(1e-34F);
  const float top = std::bit_cast<float>(std::max(least, hn::GetLane(hn::MaxOfLanes(di, largest))));
  const auto inverse = hn::Set(df, kTop / top);
  auto total = hn::Zero(di);
  for (std::size_t k = 0; k < size; k += lanes) {
    const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, x + k), inverse));
    total = hn::Add(total, rounded);
    hn::StoreU(hn::DemoteTo(dh, rounded), dh, out + k);
  }
  const float scale = top * (1.0F / kTop);
  *sum = scale * static_cast<float>(hn::GetLane(hn::SumOfLanes(di, total)));
  return scale;
}

// A block of values in order → parts, each a vector.
template <int kWidth>
void spread(const std::int16_t* HWY_RESTRICT values, std::int16_t* HWY_RESTRICT out) {
  const Int16s d;
  const std::size_t lanes = hn::Lanes(d);
  hn::Vec<Int16s> a, b;
  if constexpr (kWidth == 8) {
    hn::LoadInterleaved2(d, values, a, b);
  } else {
    hn::Vec<Int16s> c, e;
    hn::LoadInterleaved4(d, values, a, b, c, e);
    hn::Store(c, d, out + 2 * lanes);
    hn::Store(e, d, out + 3 * lanes);
  }
  hn::Store(a, d, out);
  hn::Store(b, d, out + lanes);
}

// value = 256 · upper + lower, both signed. `above` is the value's upper byte, of lower as it were without sign.
HWY_INLINE hn::Vec<Int8s> upper_byte(hn::Vec<Int8s> above, hn::Vec<Int8s> lower) {
  const Int8s d;
  return hn::Sub(above, hn::VecFromMask(d, hn::Lt(lower, hn::Zero(d))));
}

// A block of values in order → vectors of upper bytes, then of lower ones.
template <int kWidth>
void spread_bytes(const std::int16_t* HWY_RESTRICT values, std::int8_t* HWY_RESTRICT out) {
  const Int8s d;
  const std::size_t lanes = hn::Lanes(d);
  const auto* bytes = reinterpret_cast<const std::int8_t*>(values);
  hn::Vec<Int8s> lower, above;
  if constexpr (kWidth == 8) {
    hn::LoadInterleaved2(d, bytes, lower, above);
    hn::Store(upper_byte(above, lower), d, out);
    hn::Store(lower, d, out + lanes);
  } else {
    hn::Vec<Int8s> odd_lower, odd_above;
    hn::LoadInterleaved4(d, bytes, lower, above, odd_lower, odd_above);
    hn::Store(upper_byte(above, lower), d, out);
    hn::Store(upper_byte(odd_above, odd_lower), d, out + lanes);
    hn::Store(lower, d, out + 2 * lanes);
    hn::Store(odd_lower, d, out + 3 * lanes);
  }
}

template <int kWidth>
void prepare_quantized(const Layout& layout, bool bytes, const float* HWY_RESTRICT x, std::size_t row,
                       std::uint8_t* HWY_RESTRICT to) {
  const std::size_t padded = layout.blocks * layout.values;
  auto* values = static_cast<std::int16_t*>(scratch(padded * sizeof(std::int16_t)));
  auto* scales = reinterpret_cast<float*>(to + layout.scales_offset) + row * layout.scales_stride;
  auto* sums = reinterpret_cast<float*>(to + layout.sums_offset) + row * layout.sums_stride;
  for (std::size_t g = 0; g < layout.groups; ++g)
    scales[g] = quantize_group(x + g * layout.group_size, layout.group_size, values + g * layout.group_size, sums + g);
  std::fill(sums + layout.groups, sums + layout.sums_stride, 0.0F);
  for (std::size_t g = layout.groups; g < layout.scales_stride; ++g) scales[g] = scales[g - layout.groups];
  std::fill(values + layout.cols, values + padded, std::int16_t{0});

  std::uint8_t* block = to + row * layout.row_bytes;
  for (std::size_t v = 0; v < layout.blocks; ++v, block += layout.block_bytes) {
    if (bytes) {
      spread_bytes<kWidth>(values + v * layout.values, reinterpret_cast<std::int8_t*>(block));
    } else {
      spread<kWidth>(values + v * layout.values, reinterpret_cast<std::int16_t*>(block));
    }
  }
}

inline void prepare_dense(const Layout& layout, const float* HWY_RESTRICT x, std::size_t row,
                          std::uint8_t* HWY_RESTRICT to) {
  auto* out = reinterpret_cast<float*>(to + row * layout.row_bytes);
  std::memcpy(out, x, layout.cols * sizeof(float));
  std::fill(out + layout.cols, out + layout.row_bytes / sizeof(float), 0.0F);
}

inline void prepare_all(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end,
                        void* prepared) {
  const Layout layout(form, num_rows, hn::Lanes(Bytes()));
  auto* to = static_cast<std::uint8_t*>(prepared);
  for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row) {
    const float* from = x + row * ldx;
    if (form.bits == 0) {
      prepare_dense(layout, from, row, to);
    } else if (width_of(form.bits) == 4) {
      prepare_quantized<4>(layout, kByteProducts && num_rows == 1, from, row, to);
    } else {
      prepare_quantized<8>(layout, kByteProducts && num_rows == 1, from, row, to);
    }
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
