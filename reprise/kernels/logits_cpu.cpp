#include "reprise/kernels/logits_cpu.h"

#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/logits_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The vector at x + i; lanes beyond the row hold -infinity. (Highway's masked loads and stores touch every lane where
// the instruction set has no masks.)
HWY_ATTR HWY_INLINE V load_padded(D d, const float* HWY_RESTRICT x, int i, int n) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (i + lanes <= n) return hn::LoadU(d, x + i);
  HWY_ALIGN float padded[hn::MaxLanes(D())];
  hn::Store(hn::Set(d, kLowest), d, padded);
  for (int k = 0; k < lanes && i + k < n; ++k) padded[k] = x[i + k];
  return hn::Load(d, padded);
}

HWY_ATTR HWY_INLINE V power(D d, V v, V max, V factor) { return hn::Exp(d, hn::Mul(hn::Sub(v, max), factor)); }

HWY_ATTR double sum_of_powers_(const float* HWY_RESTRICT x, int n, float max, float factor) {
  const D d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const V top = hn::Set(d, max);
  const V by = hn::Set(d, factor);
  // Short sums lose little.
  constexpr int kLength = 1024;
  double sum = 0.0;
  for (int begin = 0; begin < n; begin += kLength) {
    const int end = n - begin < kLength ? n : begin + kLength;
    V even = hn::Zero(d);
    V odd = hn::Zero(d);
    int i = begin;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      even = hn::Add(even, power(d, hn::LoadU(d, x + i), top, by));
      odd = hn::Add(odd, power(d, hn::LoadU(d, x + i + lanes), top, by));
    }
    for (; i < end; i += lanes) even = hn::Add(even, power(d, load_padded(d, x, i, end), top, by));
    sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))));
  }
  return sum;
}

HWY_ATTR void powers_(const float* HWY_RESTRICT x, int n, float max, float factor, float* HWY_RESTRICT out) {
  const D d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const V top = hn::Set(d, max);
  const V by = hn::Set(d, factor);
  int i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(power(d, hn::LoadU(d, x + i), top, by), d, out + i);
  if (i == n) return;
  HWY_ALIGN float padded[hn::MaxLanes(D())];
  hn::Store(power(d, load_padded(d, x, i, n), top, by), d, padded);
  for (int k = 0; k < lanes && i + k < n; ++k) out[i + k] = padded[k];
}

HWY_ATTR PieceSummary summarize_piece_(const float* HWY_RESTRICT x, int n) {
  const D d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const V zero = hn::Zero(d);
  V best = hn::Set(d, kLowest);
  V strange = zero;  // not a number after any number that is not finite
  V best2 = best;
  V strange2 = zero;
  int i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const V a = hn::LoadU(d, x + i);
    const V b = hn::LoadU(d, x + i + lanes);
    best = hn::Max(best, a);
    best2 = hn::Max(best2, b);
    strange = hn::MulAdd(a, zero, strange);
    strange2 = hn::MulAdd(b, zero, strange2);
  }
  best = hn::Max(best, best2);
  strange = hn::Add(strange, strange2);
  PieceSummary summary{hn::GetLane(hn::MaxOfLanes(d, best)), 0, 0.0};
  bool is_strange = hn::GetLane(hn::SumOfLanes(d, strange)) != 0.0f;
  for (; i < n; ++i) {
    if (x[i] > summary.max) summary.max = x[i];
    is_strange = is_strange || !std::isfinite(x[i]);
  }
  if (is_strange) {
    summary.max = kLowest;
    for (i = 0; i < n; ++i) {
      if (!(x[i] < std::numeric_limits<float>::infinity())) {
        summary.sum = std::numeric_limits<double>::quiet_NaN();
        return summary;
      }
      if (x[i] > summary.max) summary.max = x[i];
    }
    if (summary.max == kLowest) return summary;
  }
  while (x[summary.argmax] != summary.max) ++summary.argmax;
  summary.sum = sum_of_powers_(x, n, summary.max, 1.0f);
  return summary;
}

HWY_ATTR void subtract_(const float* HWY_RESTRICT x, int n, float y, float* HWY_RESTRICT out) {
  const D d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const V by = hn::Set(d, y);
  int i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Sub(hn::LoadU(d, x + i), by), d, out + i);
  for (; i < n; ++i) out[i] = x[i] - y;
}

HWY_ATTR int gather_at_least_(const float* HWY_RESTRICT x, int n, float least, float* HWY_RESTRICT values,
                              std::int32_t* HWY_RESTRICT ids) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V limit = hn::Set(d, least);
  int count = 0;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < n; i += lanes) {
    const V v = load_padded(d, x, i, n);
    auto kept = hn::Ge(v, limit);
    if (i + lanes > n) kept = hn::And(kept, hn::FirstN(d, static_cast<std::size_t>(n - i)));
    if (hn::AllFalse(d, kept)) continue;
    hn::CompressStore(v, kept, d, values + count);
    count += static_cast<int>(hn::CompressStore(hn::Iota(di, i), hn::RebindMask(di, kept), di, ids + count));
  }
  return count;
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(summarize_piece_);
HWY_EXPORT(sum_of_powers_);
HWY_EXPORT(powers_);
HWY_EXPORT(subtract_);
HWY_EXPORT(gather_at_least_);

PieceSummary summarize_piece(const float* x, int n) { return HWY_DYNAMIC_DISPATCH(summarize_piece_)(x, n); }

double sum_of_powers(const float* x, int n, float max, float factor) {
  return HWY_DYNAMIC_DISPATCH(sum_of_powers_)(x, n, max, factor);
}

void powers(const float* x, int n, float max, float factor, float* out) {
  HWY_DYNAMIC_DISPATCH(powers_)(x, n, max, factor, out);
}

void subtract(const float* x, int n, float y, float* out) { HWY_DYNAMIC_DISPATCH(subtract_)(x, n, y, out); }

int gather_at_least(const float* x, int n, float least, float* values, std::int32_t* ids) {
  return HWY_DYNAMIC_DISPATCH(gather_at_least_)(x, n, least, values, ids);
}

RowSummary join(const PieceSummary* pieces, int num_pieces) {
  int best = 0;
  for (int i = 1; i < num_pieces; ++i) {
    if (pieces[i].max > pieces[best].max) best = i;
  }
  const float max = pieces[best].max;
  double sum = 0.0;
  for (int i = 0; i < num_pieces; ++i) {
    const bool adds = pieces[i].sum != 0.0;  // a NaN does
    if (adds) sum += pieces[i].sum * std::exp(static_cast<double>(pieces[i].max) - static_cast<double>(max));
  }
  const bool is_strange = std::isnan(sum) || sum == 0.0;
  return {max, best * kPieceLength + pieces[best].argmax,
          is_strange ? std::numeric_limits<float>::quiet_NaN()
                     : static_cast<float>(static_cast<double>(max) + std::log(sum))};
}

}  // namespace reprise::kernels::cpu
#endif
