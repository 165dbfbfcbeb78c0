#include "reprise/kernels/short_conv_cpu.h"

#include <algorithm>

#include "reprise/kernels/scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/short_conv_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#ifndef REPRISE_KERNELS_SHORT_CONV_CPU_TASKS_
#define REPRISE_KERNELS_SHORT_CONV_CPU_TASKS_
namespace reprise::kernels::cpu {

constexpr int kConvChannels = 64;  // of a task

}  // namespace reprise::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

HWY_ATTR HWY_INLINE V silu(D d, V x) {
  const V power = hn::Exp(d, hn::Neg(hn::Abs(x)));  // cannot overflow
  const V one = hn::Set(d, 1.0f);
  return hn::Mul(x, hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, power), hn::Add(one, power)));
}

// The inputs of one row's channels: first the state's, then the chunk's, zeros where there are none.
class Inputs {
 public:
  Inputs(const ShortConvView& conv, int row, int first, const float* zeros)
      : conv_(conv), row_(row), first_(first), zeros_(zeros) {}

  // `i`: from 0, of K - 1 + L.
  const float* at(int i) const {
    const int column = i - (conv_.width - 1);
    if (column < 0) {
      const std::ptrdiff_t place = static_cast<std::ptrdiff_t>(row_) * (conv_.width - 1) + i;
      return conv_.initial != nullptr ? conv_.initial + place * conv_.channels + first_ : zeros_;
    }
    const bool is_real =
        conv_.mask == nullptr || conv_.mask[static_cast<std::ptrdiff_t>(row_) * conv_.columns + column] != 0;
    return is_real ? conv_.x.at(row_, column) + first_ : zeros_;
  }

 private:
  const ShortConvView& conv_;
  int row_;
  int first_;
  const float* zeros_;
};

HWY_ATTR void short_conv_task(const ShortConvView& conv, int task) {
  const D d;
  const auto lanes = static_cast<int>(hn::Lanes(d));
  const int tiles = (conv.channels + kConvChannels - 1) / kConvChannels;
  const int row = task / tiles;
  const int first = task % tiles * kConvChannels;
  const int count = std::min(kConvChannels, conv.channels - first);
  const int vectors = count / lanes * lanes;
  // Weights with channels beside each other, then a row of zeros.
  const auto taps = static_cast<std::size_t>(conv.width);
  float* const weight = static_cast<float*>(scratch((taps + 1) * kConvChannels * sizeof(float)));
  float* const zeros = weight + taps * kConvChannels;
  std::fill(weight, zeros + kConvChannels, 0.0f);
  for (int c = 0; c < count; ++c) {
    for (int k = 0; k < conv.width; ++k) {
      weight[k * kConvChannels + c] = conv.weight[static_cast<std::ptrdiff_t>(first + c) * conv.width + k];
    }
  }
  HWY_ALIGN float bias[kConvChannels] = {};
  if (conv.bias != nullptr) std::copy_n(conv.bias + first, count, bias);
  HWY_ALIGN float rest[kConvChannels];
  const Inputs inputs(conv, row, first, zeros);
  for (int column = 0; column < conv.columns; ++column) {
    float* const out = conv.output + (static_cast<std::ptrdiff_t>(row) * conv.columns + column) * conv.channels + first;
    float* const sums = vectors == count ? out : rest;  // whole vectors would end behind the row
    for (int k = 0; k < conv.width; ++k) {
      const float* const in = inputs.at(column + k);
      const float* const w = weight + k * kConvChannels;
      for (int c = 0; c < vectors; c += lanes) {
        const V sum = k == 0 ? hn::Load(d, bias + c) : hn::LoadU(d, sums + c);
        hn::StoreU(hn::MulAdd(hn::LoadU(d, in + c), hn::Load(d, w + c), sum), d, sums + c);
      }
      for (int c = vectors; c < count; ++c) sums[c] = (k == 0 ? bias[c] : sums[c]) + in[c] * w[c];
    }
    if (conv.silu) {
      const int whole = sums == rest ? (count + lanes - 1) / lanes * lanes : count;
      std::fill(rest + count, rest + kConvChannels, 0.0f);
      for (int c = 0; c < whole; c += lanes) hn::StoreU(silu(d, hn::LoadU(d, sums + c)), d, sums + c);
    }
    if (sums == rest) std::copy_n(rest, count, out);
  }
  const int end = conv.lengths != nullptr ? std::clamp(conv.lengths[row], 0, conv.columns) : conv.columns;
  for (int i = 0; i + 1 < conv.width; ++i) {
    const std::ptrdiff_t place = static_cast<std::ptrdiff_t>(row) * (conv.width - 1) + i;
    std::copy_n(inputs.at(end + i), count, conv.state + place * conv.channels + first);
  }
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(short_conv_task);

int num_short_conv_tasks(const ShortConvView& conv) {
  return conv.rows * ((conv.channels + kConvChannels - 1) / kConvChannels);
}
void run_short_conv_task(const ShortConvView& conv, int task) { HWY_DYNAMIC_DISPATCH(short_conv_task)(conv, task); }

}  // namespace reprise::kernels::cpu
#endif  // HWY_ONCE
