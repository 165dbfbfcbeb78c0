#include "reprise/kernels/rg_lru_cpu.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/rg_lru_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#ifndef REPRISE_KERNELS_RG_LRU_CPU_ONCE_
#define REPRISE_KERNELS_RG_LRU_CPU_ONCE_
namespace reprise::kernels::cpu {

// Features in one task. At least the lanes of a vector.
constexpr int kTaskFeatures = 128;

}  // namespace reprise::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kTaskFeatures>;
using V = hn::Vec<D>;

// Of a power that cannot overflow, whatever x.
HWY_ATTR HWY_INLINE V sigmoid(D d, V x) {
  const V power = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const V one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, power), hn::Add(one, power));
}

// One column's new state; `first`: the row begins with it.
HWY_ATTR HWY_INLINE V step(D d, V h, V x, V input_gate, V recurrent_gate, V decay, bool first) {
  const V rate = hn::Neg(hn::Mul(decay, sigmoid(d, recurrent_gate)));
  V input = hn::Mul(sigmoid(d, input_gate), x);
  if (!first) {
    // 1 - α² of a rate near 0 would lose all digits.
    const V rest = hn::Neg(hn::Expm1(d, hn::Add(rate, rate)));
    input = hn::Mul(input, hn::Sqrt(hn::Max(rest, hn::Zero(d))));
  }
  return hn::MulAdd(hn::Exp(d, rate), h, input);
}

// Features begin … begin + count - 1 of a row over all columns. `first`: the column with which the row begins.
HWY_ATTR void run_features(const RgLruView& view, int row, int begin, int count, int first) {
  const D d;
  const auto lanes = static_cast<int>(hn::Lanes(d));
  const int whole = count / lanes * lanes;
  const auto rest = static_cast<std::size_t>(count - whole);
  HWY_ALIGN float h[kTaskFeatures] = {};
  HWY_ALIGN float decay[kTaskFeatures] = {};
  std::copy_n(view.decay + begin, count, decay);
  if (view.initial) std::copy_n(view.initial + static_cast<std::ptrdiff_t>(row) * view.size + begin, count, h);
  for (int t = 0; t < view.columns; ++t) {
    const std::ptrdiff_t column = static_cast<std::ptrdiff_t>(row) * view.columns + t;
    const std::ptrdiff_t at = column * view.size + begin;
    if (view.real == nullptr || view.real[column] != 0) {
      const float* x = view.x + at;
      const float* input_gate = view.input_gate + at;
      const float* recurrent_gate = view.recurrent_gate + at;
      for (int i = 0; i < whole; i += lanes) {
        hn::Store(step(d, hn::Load(d, h + i), hn::LoadU(d, x + i), hn::LoadU(d, input_gate + i),
                       hn::LoadU(d, recurrent_gate + i), hn::Load(d, decay + i), t == first),
                  d, h + i);
      }
      if (rest > 0) {
        // Masked loads touch whole vectors on some targets.
        HWY_ALIGN float last[3][hn::MaxLanes(D())] = {};
        std::copy_n(x + whole, rest, last[0]);
        std::copy_n(input_gate + whole, rest, last[1]);
        std::copy_n(recurrent_gate + whole, rest, last[2]);
        hn::Store(step(d, hn::Load(d, h + whole), hn::Load(d, last[0]), hn::Load(d, last[1]), hn::Load(d, last[2]),
                       hn::Load(d, decay + whole), t == first),
                  d, h + whole);
      }
    }
    std::copy_n(h, count, view.output + at);
  }
  std::copy_n(h, count, view.state + static_cast<std::ptrdiff_t>(row) * view.size + begin);
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(run_features);

namespace {

// The first real column of a row whose state is all zeros; as many as there are columns where there is none.
int first_column(const RgLruView& view, int row) {
  const float* h = view.initial ? view.initial + static_cast<std::ptrdiff_t>(row) * view.size : nullptr;
  if (h != nullptr && std::any_of(h, h + view.size, [](float x) { return x != 0.0f; })) return view.columns;
  if (view.real == nullptr) return 0;
  const std::uint8_t* real = view.real + static_cast<std::ptrdiff_t>(row) * view.columns;
  return static_cast<int>(std::find_if(real, real + view.columns, [](std::uint8_t is) { return is != 0; }) - real);
}

}  // namespace

void rg_lru(const RgLruView& view, ThreadPool& pool) {
  std::vector<int> first;
  for (int row = 0; row < view.rows; ++row) first.push_back(first_column(view, row));
  const int blocks = (view.size + kTaskFeatures - 1) / kTaskFeatures;
  pool.run(view.rows * blocks, [&](int task) {
    const int row = task / blocks;
    const int begin = task % blocks * kTaskFeatures;
    HWY_DYNAMIC_DISPATCH(run_features)
    (view, row, begin, std::min(kTaskFeatures, view.size - begin), first[static_cast<std::size_t>(row)]);
  });
}

}  // namespace reprise::kernels::cpu
#endif
