#include "reprise/kernels/delta_rule_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "reprise/kernels/buffers.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/delta_rule_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

#ifndef REPRISE_KERNELS_DELTA_RULE_CPU_ONCE_
#define REPRISE_KERNELS_DELTA_RULE_CPU_ONCE_
namespace reprise::kernels::cpu {

// What a column brings to a value head, besides vectors. Queries and keys stay as they come: their lengths are here.
struct DeltaFactors {
  float keep;   // α
  float write;  // β
  float key;    // 1 / |k|
  float query;  // 1 / (|q| √Dk)
  float match;  // k · q of the scaled ones
};

// Rows of a head's state in one task: with keys of 128 features they stay in the first cache over all columns.
constexpr int kTaskRows = 32;

}  // namespace reprise::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

HWY_ATTR HWY_INLINE float sum_of(V x) { return hn::GetLane(hn::SumOfLanes(D(), x)); }

HWY_ATTR float dot(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::size_t n) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  V sum = hn::Zero(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) sum = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, y + i), sum);
  float rest = 0.0f;
  for (; i < n; ++i) rest += x[i] * y[i];
  return sum_of(sum) + rest;
}

// What a column of one key head holds.
struct Column {
  const float* k;
  const float* q;
  std::size_t n;  // Dk
};

// One row S of the state: S ← α S + β (v - α S k) kᵀ with k of unit length. Returns: S q / √Dk.
HWY_ATTR float step_row(const Column& column, const DeltaFactors& f, float v, const float* from, float* to) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const float* HWY_RESTRICT k = column.k;
  const float* HWY_RESTRICT q = column.q;
  V along_k = hn::Zero(d);
  V along_q = hn::Zero(d);
  std::size_t i = 0;
  for (; i + lanes <= column.n; i += lanes) {
    const V s = hn::LoadU(d, from + i);
    along_k = hn::MulAdd(s, hn::LoadU(d, k + i), along_k);
    along_q = hn::MulAdd(s, hn::LoadU(d, q + i), along_q);
  }
  float rest_k = 0.0f;
  float rest_q = 0.0f;
  for (std::size_t j = i; j < column.n; ++j) {
    rest_k += from[j] * k[j];
    rest_q += from[j] * q[j];
  }
  const float delta = f.write * (v - f.keep * f.key * (sum_of(along_k) + rest_k));
  const float out = f.keep * f.query * (sum_of(along_q) + rest_q) + delta * f.match;
  const V keep = hn::Set(d, f.keep);
  const V add = hn::Set(d, delta * f.key);
  for (i = 0; i + lanes <= column.n; i += lanes) {
    hn::StoreU(hn::MulAdd(add, hn::LoadU(d, k + i), hn::Mul(keep, hn::LoadU(d, from + i))), d, to + i);
  }
  for (; i < column.n; ++i) to[i] = f.keep * from[i] + delta * f.key * k[i];
  return out;
}

// Four rows of whole vectors at once, which read k and q once.
HWY_ATTR void step_rows(const Column& column, const DeltaFactors& f, const float* v, const float* from, float* to,
                        float* out) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t n = column.n;
  const float* HWY_RESTRICT k = column.k;
  const float* HWY_RESTRICT q = column.q;
  V k0 = hn::Zero(d), k1 = k0, k2 = k0, k3 = k0, q0 = k0, q1 = k0, q2 = k0, q3 = k0;
  for (std::size_t i = 0; i < n; i += lanes) {
    const V key = hn::LoadU(d, k + i);
    const V query = hn::LoadU(d, q + i);
    const V s0 = hn::LoadU(d, from + i);
    const V s1 = hn::LoadU(d, from + n + i);
    const V s2 = hn::LoadU(d, from + 2 * n + i);
    const V s3 = hn::LoadU(d, from + 3 * n + i);
    k0 = hn::MulAdd(s0, key, k0);
    k1 = hn::MulAdd(s1, key, k1);
    k2 = hn::MulAdd(s2, key, k2);
    k3 = hn::MulAdd(s3, key, k3);
    q0 = hn::MulAdd(s0, query, q0);
    q1 = hn::MulAdd(s1, query, q1);
    q2 = hn::MulAdd(s2, query, q2);
    q3 = hn::MulAdd(s3, query, q3);
  }
  const float along_k[4] = {sum_of(k0), sum_of(k1), sum_of(k2), sum_of(k3)};
  const float along_q[4] = {sum_of(q0), sum_of(q1), sum_of(q2), sum_of(q3)};
  float add[4];
  for (int r = 0; r < 4; ++r) {
    const float delta = f.write * (v[r] - f.keep * f.key * along_k[r]);
    out[r] = f.keep * f.query * along_q[r] + delta * f.match;
    add[r] = delta * f.key;
  }
  const V keep = hn::Set(d, f.keep);
  const V a0 = hn::Set(d, add[0]), a1 = hn::Set(d, add[1]), a2 = hn::Set(d, add[2]), a3 = hn::Set(d, add[3]);
  for (std::size_t i = 0; i < n; i += lanes) {
    const V key = hn::LoadU(d, k + i);
    hn::StoreU(hn::MulAdd(a0, key, hn::Mul(keep, hn::LoadU(d, from + i))), d, to + i);
    hn::StoreU(hn::MulAdd(a1, key, hn::Mul(keep, hn::LoadU(d, from + n + i))), d, to + n + i);
    hn::StoreU(hn::MulAdd(a2, key, hn::Mul(keep, hn::LoadU(d, from + 2 * n + i))), d, to + 2 * n + i);
    hn::StoreU(hn::MulAdd(a3, key, hn::Mul(keep, hn::LoadU(d, from + 3 * n + i))), d, to + 3 * n + i);
  }
}

// Of all value heads in one column.
HWY_ATTR void make_factors(const DeltaRuleView& view, int column, DeltaFactors* factors) {
  const auto n = static_cast<std::size_t>(view.key_dim);
  const auto Hv = static_cast<std::size_t>(view.value_heads);
  const std::size_t keys = static_cast<std::size_t>(view.key_heads) * n;
  const std::size_t size = 2 * keys + Hv * static_cast<std::size_t>(view.value_dim);
  const float* q = view.qkv + static_cast<std::size_t>(column) * size;
  const float* a = view.a + static_cast<std::size_t>(column) * Hv;
  const float* b = view.b + static_cast<std::size_t>(column) * Hv;
  const bool real = view.real == nullptr || view.real[column] != 0;
  const std::size_t group = Hv / static_cast<std::size_t>(view.key_heads);
  for (std::size_t h = 0; h < Hv; ++h) {
    DeltaFactors& f = factors[h];
    if (h % group == 0) {
      const float* query = q + h / group * n;
      const float* key = query + keys;
      f.key = 1.0f / std::sqrt(dot(key, key, n) + 1e-6f);
      f.query = 1.0f / std::sqrt((dot(query, query, n) + 1e-6f) * static_cast<float>(n));
      f.match = dot(key, query, n) * f.key * f.query;
    } else {
      f = factors[h - 1];
    }
    const float x = a[h] + view.dt_bias[h];
    const float softplus = std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
    f.keep = real ? std::exp(-view.decay[h] * softplus) : 1.0f;
    f.write = real ? 1.0f / (1.0f + std::exp(-b[h])) : 0.0f;
  }
}

// Rows first … last - 1 of a head's state over all columns.
HWY_ATTR void run_rows(const DeltaRuleView& view, const DeltaFactors* factors, int row, int head, int first, int last) {
  const auto n = static_cast<std::size_t>(view.key_dim);
  const auto Hv = static_cast<std::size_t>(view.value_heads);
  const auto Dv = static_cast<std::size_t>(view.value_dim);
  const std::size_t keys = static_cast<std::size_t>(view.key_heads) * n;
  const std::size_t size = 2 * keys + Hv * Dv;
  const auto h = static_cast<std::size_t>(head);
  const std::size_t at = ((static_cast<std::size_t>(row) * Hv + h) * Dv + static_cast<std::size_t>(first)) * n;
  const auto count = static_cast<std::size_t>(last - first);
  float* const state = view.state + at;
  const float* from = view.initial ? view.initial + at : state;
  if (view.initial == nullptr) std::fill_n(state, count * n, 0.0f);
  const std::size_t key_head = h / (Hv / static_cast<std::size_t>(view.key_heads));
  const bool whole = n % hn::Lanes(D()) == 0;
  for (int t = 0; t < view.columns; ++t) {
    const std::size_t column =
        static_cast<std::size_t>(row) * static_cast<std::size_t>(view.columns) + static_cast<std::size_t>(t);
    const float* x = view.qkv + column * size;
    const Column kq{x + keys + key_head * n, x + key_head * n, n};
    const float* v = x + 2 * keys + h * Dv + static_cast<std::size_t>(first);
    float* out = view.output + (column * Hv + h) * Dv + static_cast<std::size_t>(first);
    const DeltaFactors& f = factors[column * Hv + h];
    std::size_t r = 0;
    for (; whole && r + 4 <= count; r += 4) step_rows(kq, f, v + r, from + r * n, state + r * n, out + r);
    for (; r < count; ++r) out[r] = step_row(kq, f, v[r], from + r * n, state + r * n);
    from = state;
  }
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(make_factors);
HWY_EXPORT(run_rows);

void gated_delta_rule(const DeltaRuleView& view, ThreadPool& pool) {
  const auto Hv = static_cast<std::size_t>(view.value_heads);
  const int columns = view.rows * view.columns;
  const auto num_factors = static_cast<std::size_t>(columns) * Hv;
  auto* const factors = static_cast<DeltaFactors*>(
      buffer(Buffer::prepared, std::max<std::size_t>(num_factors, 1) * sizeof(DeltaFactors)));
  // A task must be worth its handing out.
  constexpr int kTaskColumns = 16;
  pool.run((columns + kTaskColumns - 1) / kTaskColumns, [&](int task) {
    const int end = std::min(columns, (task + 1) * kTaskColumns);
    for (int column = task * kTaskColumns; column < end; ++column) {
      HWY_DYNAMIC_DISPATCH(make_factors)(view, column, factors + static_cast<std::size_t>(column) * Hv);
    }
  });
  const int blocks = (view.value_dim + kTaskRows - 1) / kTaskRows;
  pool.run(view.rows * view.value_heads * blocks, [&](int task) {
    const int first = task % blocks * kTaskRows;
    const int head = task / blocks % view.value_heads;
    HWY_DYNAMIC_DISPATCH(run_rows)
    (view, factors, task / blocks / view.value_heads, head, first, std::min(first + kTaskRows, view.value_dim));
  });
}

}  // namespace reprise::kernels::cpu
#endif
