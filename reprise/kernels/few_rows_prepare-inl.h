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

// One group: int16 values whose largest is ±32767. Returns: the scale, and in `sum` the group's sum of scaled values.
// A group that holds an infinity or a NaN gets such a scale and sum.
inline float quantize_group(const float* HWY_RESTRICT x, std::size_t size, std::int16_t* HWY_RESTRICT out, float* sum) {
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
  const auto inverse = hn::Set(df, 32767.0F / top);
  auto total = hn::Zero(di);
  for (std::size_t k = 0; k < size; k += lanes) {
    const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, x + k), inverse));
    total = hn::Add(total, rounded);
    hn::StoreU(hn::DemoteTo(dh, rounded), dh, out + k);
  }
  const float scale = top * (1.0F / 32767.0F);
  *sum = scale * static_cast<float>(hn::GetLane(hn::SumOfLanes(di, total)));
  return scale;
}

// values: a block in order → parts, each a vector.
template <int kBits>
void spread(const std::int16_t* HWY_RESTRICT values, std::int16_t* HWY_RESTRICT out) {
  const Int16s d;
  const std::size_t lanes = hn::Lanes(d);
  if constexpr (kBits == 8) {
    hn::Vec<Int16s> a, b;
    hn::LoadInterleaved2(d, values, a, b);
    hn::Store(a, d, out);
    hn::Store(b, d, out + lanes);
  } else if constexpr (kBits == 4) {
    hn::Vec<Int16s> a, b, c, e;
    hn::LoadInterleaved4(d, values, a, b, c, e);
    hn::Store(a, d, out);
    hn::Store(b, d, out + lanes);
    hn::Store(c, d, out + 2 * lanes);
    hn::Store(e, d, out + 3 * lanes);
  } else {
    constexpr std::size_t kParts = 16 / kBits;
    for (std::size_t lane = 0; lane < lanes; ++lane)
      for (std::size_t part = 0; part < kParts; ++part) out[part * lanes + lane] = values[lane * kParts + part];
  }
}

template <int kBits>
void prepare_packed(const Layout& layout, const float* HWY_RESTRICT x, std::size_t row, std::uint8_t* HWY_RESTRICT to) {
  const Floats df;
  const std::size_t lanes = hn::Lanes(df);
  const std::size_t padded = layout.blocks * layout.values;
  // Values in order, then a scale for each group; the last block may reach past both.
  auto* values = static_cast<std::int16_t*>(
      scratch(padded * sizeof(std::int16_t) + (layout.groups + kMaxVectorBytes) * sizeof(float)));
  auto* scales = reinterpret_cast<float*>(values + padded);
  auto* sums = reinterpret_cast<float*>(to + layout.sums_offset) + row * layout.sums_stride;
  for (std::size_t g = 0; g < layout.groups; ++g)
    scales[g] = quantize_group(x + g * layout.group_size, layout.group_size, values + g * layout.group_size, sums + g);
  std::fill(sums + layout.groups, sums + layout.sums_stride, 0.0F);
  std::fill(values + layout.cols, values + padded, std::int16_t{0});
  std::fill(scales + layout.groups, scales + layout.groups + kMaxVectorBytes, 0.0F);

  const std::size_t values_in_lane = layout.values / lanes;
  std::uint8_t* block = to + row * layout.row_bytes;
  for (std::size_t v = 0; v < layout.blocks; ++v, block += layout.block_bytes) {
    spread<kBits>(values + v * layout.values, reinterpret_cast<std::int16_t*>(block));
    auto* lane_scales = reinterpret_cast<float*>(block + 16 / kBits * lanes * sizeof(float));
    for (std::size_t lane = 0; lane < lanes; ++lane)
      lane_scales[lane] = scales[(v * layout.values + lane * values_in_lane) / layout.group_size];
  }
}

inline void prepare_dense(const Layout& layout, const float* HWY_RESTRICT x, std::size_t row,
                          std::uint8_t* HWY_RESTRICT to) {
  auto* out = reinterpret_cast<float*>(to + row * layout.row_bytes);
  std::memcpy(out, x, layout.cols * sizeof(float));
  std::fill(out + layout.cols, out + layout.row_bytes / sizeof(float), 0.0F);
}

inline void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end,
                    void* prepared) {
  const Layout layout(form, num_rows, hn::Lanes(Bytes()));
  auto* to = static_cast<std::uint8_t*>(prepared);
  for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row) {
    const float* from = x + row * ldx;
    if (form.bits == 0) {
      prepare_dense(layout, from, row, to);
    } else if (lane_bits(form.bits) == 2) {
      prepare_packed<2>(layout, from, row, to);
    } else if (lane_bits(form.bits) == 4) {
      prepare_packed<4>(layout, from, row, to);
    } else {
      prepare_packed<8>(layout, from, row, to);
    }
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
