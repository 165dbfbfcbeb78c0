#include "reprise/kernels/elementwise.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/elementwise.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// Calls step(i, count): whole vectors, then what is left, of which fewer lanes than a vector are meant.
template <typename Whole, typename Part>
HWY_ATTR HWY_INLINE void for_each_vector(std::size_t n, const Whole& whole, const Part& part) {
  const std::size_t lanes = hn::Lanes(D());
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) whole(i);
  if (i < n) part(i, n - i);
}

HWY_ATTR float sum_of_squares(const float* HWY_RESTRICT x, std::size_t n) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  V sum0 = hn::Zero(d);
  V sum1 = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const V a = hn::LoadU(d, x + i);
    const V b = hn::LoadU(d, x + i + lanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float rest = 0.0f;
  for (; i < n; ++i) rest += x[i] * x[i];
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + rest;
}

HWY_ATTR void rms_norm_row(const float* x, std::size_t size, const float* HWY_RESTRICT weight, float eps, float* out) {
  const D d;
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
  const V by = hn::Set(d, factor);
  for_each_vector(
      size,
      [&](std::size_t i)
          HWY_ATTR { hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), by), hn::LoadU(d, weight + i)), d, out + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        for (std::size_t k = i; k < i + count; ++k) out[k] = x[k] * factor * weight[k];
      });
}

HWY_ATTR void add_row(const float* HWY_RESTRICT x, std::size_t size, float* HWY_RESTRICT out) {
  const D d;
  for_each_vector(
      size,
      [&](std::size_t i) HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, out + i), hn::LoadU(d, x + i)), d, out + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        for (std::size_t k = i; k < i + count; ++k) out[k] += x[k];
      });
}

// Of a power that cannot overflow, whatever x.
HWY_ATTR HWY_INLINE V sigmoid(D d, V x) {
  const V power = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const V one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, power), hn::Add(one, power));
}

struct Silu {
  HWY_ATTR HWY_INLINE V operator()(D d, V x) const { return hn::Mul(x, sigmoid(d, x)); }
};

struct GeluTanh {
  HWY_ATTR HWY_INLINE V operator()(D d, V x) const {
    constexpr float kTwiceRootOf2OverPi = 1.5957691216f;
    const V square = hn::Mul(x, x);
    const V inner =
        hn::Mul(x, hn::MulAdd(square, hn::Set(d, 0.044715f * kTwiceRootOf2OverPi), hn::Set(d, kTwiceRootOf2OverPi)));
    return hn::Mul(x, sigmoid(d, inner));
  }
};

template <typename Act>
struct TimesUp {
  HWY_ATTR HWY_INLINE V operator()(D d, V gate, V up) const { return hn::Mul(Act()(d, gate), up); }
};

struct ClippedSwiglu {
  float alpha;
  float limit;

  HWY_ATTR HWY_INLINE V operator()(D d, V gate, V up) const {
    const V high = hn::Set(d, limit);
    // In this order, what is not a number stays so on every target.
    const V g = hn::IfThenElse(hn::Gt(gate, high), high, gate);
    const V below = hn::IfThenElse(hn::Gt(up, high), high, up);
    const V u = hn::IfThenElse(hn::Lt(below, hn::Neg(high)), hn::Neg(high), below);
    return hn::Mul(hn::Add(u, hn::Set(d, 1.0f)), hn::Mul(g, sigmoid(d, hn::Mul(hn::Set(d, alpha), g))));
  }
};

template <typename Act>
HWY_ATTR HWY_INLINE void gated(const Act& act, float* HWY_RESTRICT gate, const float* HWY_RESTRICT up, std::size_t n) {
  const D d;
  for_each_vector(
      n, [&](std::size_t i) HWY_ATTR { hn::StoreU(act(d, hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        // Masked loads and stores touch whole vectors on some targets.
        HWY_ALIGN float g[hn::MaxLanes(D())] = {};
        HWY_ALIGN float u[hn::MaxLanes(D())] = {};
        std::copy_n(gate + i, count, g);
        std::copy_n(up + i, count, u);
        hn::Store(act(d, hn::Load(d, g), hn::Load(d, u)), d, g);
        std::copy_n(g, count, gate + i);
      });
}

HWY_ATTR void silu_times_(float* gate, const float* up, std::size_t n) { gated(TimesUp<Silu>(), gate, up, n); }
HWY_ATTR void gelu_tanh_times_(float* gate, const float* up, std::size_t n) { gated(TimesUp<GeluTanh>(), gate, up, n); }
HWY_ATTR void clipped_swiglu_(float* gate, const float* up, std::size_t n, float alpha, float limit) {
  gated(ClippedSwiglu{alpha, limit}, gate, up, n);
}

HWY_ATTR void add_times_(float factor, const float* HWY_RESTRICT x, std::size_t n, float* HWY_RESTRICT out) {
  const D d;
  const V by = hn::Set(d, factor);
  for_each_vector(
      n,
      [&](std::size_t i)
          HWY_ATTR { hn::StoreU(hn::MulAdd(by, hn::LoadU(d, x + i), hn::LoadU(d, out + i)), d, out + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        for (std::size_t k = i; k < i + count; ++k) out[k] += factor * x[k];
      });
}

HWY_ATTR void rms_norm_(const float* x, std::size_t ldx, int rows, int size, const float* weight, float eps, float* out,
                        std::size_t ldo) {
  for (std::size_t m = 0; m < static_cast<std::size_t>(rows); ++m) {
    rms_norm_row(x + m * ldx, static_cast<std::size_t>(size), weight, eps, out + m * ldo);
  }
}

HWY_ATTR void add_(const float* bias, const float* residual, std::size_t ldr, int rows, int size, float* out,
                   std::size_t ldo) {
  for (std::size_t m = 0; m < static_cast<std::size_t>(rows); ++m) {
    if (bias) add_row(bias, static_cast<std::size_t>(size), out + m * ldo);
    if (residual) add_row(residual + m * ldr, static_cast<std::size_t>(size), out + m * ldo);
  }
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(rms_norm_);
HWY_EXPORT(add_);
HWY_EXPORT(silu_times_);
HWY_EXPORT(gelu_tanh_times_);
HWY_EXPORT(clipped_swiglu_);
HWY_EXPORT(add_times_);

void rms_norm(const float* x, std::size_t ldx, int rows, int size, const float* weight, float eps, float* out,
              std::size_t ldo) {
  HWY_DYNAMIC_DISPATCH(rms_norm_)(x, ldx, rows, size, weight, eps, out, ldo);
}

void add(const float* bias, const float* residual, std::size_t ldr, int rows, int size, float* out, std::size_t ldo) {
  if (!bias && !residual) return;
  HWY_DYNAMIC_DISPATCH(add_)(bias, residual, ldr, rows, size, out, ldo);
}

void silu_times(float* gate, const float* up, std::size_t n) { HWY_DYNAMIC_DISPATCH(silu_times_)(gate, up, n); }

void gelu_tanh_times(float* gate, const float* up, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(gelu_tanh_times_)(gate, up, n);
}

void clipped_swiglu(float* gate, const float* up, std::size_t n, float alpha, float limit) {
  HWY_DYNAMIC_DISPATCH(clipped_swiglu_)(gate, up, n, alpha, limit);
}

void add_times(float factor, const float* x, std::size_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(add_times_)(factor, x, n, out);
}

}  // namespace reprise::kernels::cpu
#endif
