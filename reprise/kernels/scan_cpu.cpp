#include "reprise/kernels/scan_cpu.h"

#include <algorithm>

#include "reprise/kernels/scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/scan_cpu.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#ifndef REPRISE_KERNELS_SCAN_CPU_TASKS_
#define REPRISE_KERNELS_SCAN_CPU_TASKS_
namespace reprise::kernels::cpu {

// Channels of a selective scan, or channels of one head, in a task: their states stay in the first cache.
constexpr int kTaskChannels = 16;
// Columns whose steps are made at once.
constexpr int kStepColumns = 64;

}  // namespace reprise::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kTaskChannels>;
using V = hn::Vec<D>;

HWY_INLINE int lanes() { return static_cast<int>(hn::Lanes(D())); }
// Whole vectors.
HWY_INLINE int padded(int n) { return (n + lanes() - 1) / lanes() * lanes(); }

HWY_ATTR HWY_INLINE V silu(D d, V x) {
  const V power = hn::Exp(d, hn::Neg(hn::Abs(x)));  // cannot overflow
  const V one = hn::Set(d, 1.0f);
  return hn::Mul(x, hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, power), hn::Add(one, power)));
}

// Δ = clip(softplus(delta + bias)) over n numbers, in place, whole vectors.
HWY_ATTR void make_steps(const ScanView& scan, int n, const float* HWY_RESTRICT bias, float* HWY_RESTRICT delta) {
  const D d;
  const V low = hn::Set(d, scan.low);
  const V high = hn::Set(d, scan.high);
  for (int i = 0; i < n; i += lanes()) {
    const V x = hn::Add(hn::Load(d, delta + i), hn::Load(d, bias + i));
    const V soft = hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, hn::Exp(d, hn::Neg(hn::Abs(x)))));
    hn::Store(hn::Min(hn::Max(soft, low), high), d, delta + i);
  }
}

// y *= silu(gate) over n ≤ kTaskChannels numbers.
HWY_ATTR void apply_gate(const float* HWY_RESTRICT gate, int n, float* HWY_RESTRICT y) {
  const D d;
  HWY_ALIGN float g[kTaskChannels] = {};
  std::copy_n(gate, n, g);
  for (int i = 0; i < n; i += lanes()) hn::Store(silu(d, hn::Load(d, g + i)), d, g + i);
  for (int i = 0; i < n; ++i) y[i] *= g[i];
}

// A row of n numbers as whole vectors: itself, or a copy with zeros behind it.
HWY_INLINE const float* whole(const float* row, int n, int size, float* copy) {
  if (n == size) return row;
  std::copy_n(row, n, copy);
  std::fill(copy + n, copy + size, 0.0f);
  return copy;
}

// The task's states, `count` rows of N numbers, as rows of `size`.
HWY_INLINE void load_states(const float* initial, int count, int N, int size, float* states) {
  std::fill(states, states + static_cast<std::ptrdiff_t>(count) * size, 0.0f);
  for (int i = 0; initial != nullptr && i < count; ++i) {
    std::copy_n(initial + static_cast<std::ptrdiff_t>(i) * N, N, states + static_cast<std::ptrdiff_t>(i) * size);
  }
}

HWY_INLINE void store_states(const float* states, int count, int N, int size, float* out) {
  for (int i = 0; i < count; ++i) {
    std::copy_n(states + static_cast<std::ptrdiff_t>(i) * size, N, out + static_cast<std::ptrdiff_t>(i) * N);
  }
}

// One channel, one column: h ← exp(step a) h + step x b. Returns: c · h.
HWY_ATTR HWY_INLINE float advance_channel(float step, float x, const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                                          const float* HWY_RESTRICT c, int size, float* HWY_RESTRICT h) {
  const D d;
  const V by = hn::Set(d, step);
  const V in = hn::Set(d, step * x);
  V sum = hn::Zero(d);
  for (int i = 0; i < size; i += lanes()) {
    const V decay = hn::Exp(d, hn::Mul(by, hn::LoadU(d, a + i)));
    const V next = hn::MulAdd(decay, hn::Load(d, h + i), hn::Mul(in, hn::LoadU(d, b + i)));
    hn::Store(next, d, h + i);
    sum = hn::MulAdd(next, hn::LoadU(d, c + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_ATTR void selective_scan_task(const ScanView& scan, int task) {
  const int tiles = (scan.heads + kTaskChannels - 1) / kTaskChannels;
  const int row = task / tiles;
  const int first = task % tiles * kTaskChannels;
  const int count = std::min(kTaskChannels, scan.heads - first);
  const int N = scan.states;
  const int size = padded(N);
  const auto floats = static_cast<std::size_t>(size);
  float* const states = static_cast<float*>(scratch((2 * kTaskChannels + 2) * floats * sizeof(float)));
  float* const rates = states + kTaskChannels * floats;
  float* const b_copy = rates + kTaskChannels * floats;
  float* const c_copy = b_copy + floats;
  const std::ptrdiff_t at = (static_cast<std::ptrdiff_t>(row) * scan.heads + first) * N;
  load_states(scan.initial != nullptr ? scan.initial + at : nullptr, count, N, size, states);
  load_states(scan.a + static_cast<std::ptrdiff_t>(first) * N, count, N, size, rates);
  HWY_ALIGN float bias[kTaskChannels] = {};
  HWY_ALIGN float step[kTaskChannels] = {};
  if (scan.bias != nullptr) std::copy_n(scan.bias + first, count, bias);
  for (int column = 0; column < scan.columns; ++column) {
    const std::ptrdiff_t cell = static_cast<std::ptrdiff_t>(row) * scan.columns + column;
    float* const y = scan.y + cell * scan.heads + first;
    if (scan.mask != nullptr && scan.mask[cell] == 0) {
      std::fill(y, y + count, 0.0f);
      continue;
    }
    std::copy_n(scan.delta.at(row, column) + first, count, step);
    make_steps(scan, kTaskChannels, bias, step);
    const float* const b = whole(scan.b.at(row, column), N, size, b_copy);
    const float* const c = whole(scan.c.at(row, column), N, size, c_copy);
    const float* const x = scan.x.at(row, column) + first;
    for (int i = 0; i < count; ++i) {
      const std::ptrdiff_t of = static_cast<std::ptrdiff_t>(i) * size;
      y[i] = advance_channel(step[i], x[i], rates + of, b, c, size, states + of) + scan.d[first + i] * x[i];
    }
    if (scan.gate.data != nullptr) apply_gate(scan.gate.at(row, column) + first, count, y);
  }
  store_states(states, count, N, size, scan.state + at);
}

// kChannels channels of a head, one column: h ← decay h + input b. sums: c · h.
template <int kChannels>
HWY_ATTR HWY_INLINE void advance_head(float decay, const float* input, const float* HWY_RESTRICT b,
                                      const float* HWY_RESTRICT c, int size, float* HWY_RESTRICT h, float* sums) {
  const D d;
  const V by = hn::Set(d, decay);
  V in[kChannels];
  V sum[kChannels];
  for (int k = 0; k < kChannels; ++k) {
    in[k] = hn::Set(d, input[k]);
    sum[k] = hn::Zero(d);
  }
  for (int i = 0; i < size; i += lanes()) {
    const V b_i = hn::LoadU(d, b + i);
    const V c_i = hn::LoadU(d, c + i);
    for (int k = 0; k < kChannels; ++k) {
      float* const at = h + static_cast<std::ptrdiff_t>(k) * size + i;
      const V next = hn::MulAdd(by, hn::Load(d, at), hn::Mul(in[k], b_i));
      hn::Store(next, d, at);
      sum[k] = hn::MulAdd(next, c_i, sum[k]);
    }
  }
  for (int k = 0; k < kChannels; ++k) sums[k] = hn::GetLane(hn::SumOfLanes(d, sum[k]));
}

// Steps of `count` columns of a head, and the decays that they make.
HWY_ATTR void make_head_steps(const ScanView& scan, int row, int head, int first, int count, float* HWY_RESTRICT step,
                              float* HWY_RESTRICT decay) {
  const D d;
  HWY_ALIGN float bias[kStepColumns];
  std::fill(bias, bias + kStepColumns, scan.bias != nullptr ? scan.bias[head] : 0.0f);
  std::fill(step, step + kStepColumns, 0.0f);
  for (int i = 0; i < count; ++i) step[i] = scan.delta.at(row, first + i)[head];
  make_steps(scan, padded(count), bias, step);
  const V a = hn::Set(d, scan.a[head]);
  for (int i = 0; i < count; i += lanes()) hn::Store(hn::Exp(d, hn::Mul(a, hn::Load(d, step + i))), d, decay + i);
}

HWY_ATTR void head_scan_task(const ScanView& scan, int task) {
  constexpr int kTogether = 4;
  const int tiles = (scan.head_size + kTaskChannels - 1) / kTaskChannels;
  const int head = task / tiles % scan.heads;
  const int row = task / tiles / scan.heads;
  const int first = task % tiles * kTaskChannels;
  const int count = std::min(kTaskChannels, scan.head_size - first);
  const int N = scan.states;
  const int size = padded(N);
  const int group = head / (scan.heads / scan.groups);
  const auto floats = static_cast<std::size_t>(size);
  float* const states = static_cast<float*>(scratch((kTaskChannels + 2) * floats * sizeof(float)));
  float* const b_copy = states + kTaskChannels * floats;
  float* const c_copy = b_copy + floats;
  const std::ptrdiff_t channel = static_cast<std::ptrdiff_t>(head) * scan.head_size + first;
  const std::ptrdiff_t channels = static_cast<std::ptrdiff_t>(scan.heads) * scan.head_size;
  const std::ptrdiff_t at = (row * channels + channel) * N;
  load_states(scan.initial != nullptr ? scan.initial + at : nullptr, count, N, size, states);
  HWY_ALIGN float step[kStepColumns];
  HWY_ALIGN float decay[kStepColumns];
  for (int column = 0; column < scan.columns; ++column) {
    const int place = column % kStepColumns;
    if (place == 0) {
      make_head_steps(scan, row, head, column, std::min(kStepColumns, scan.columns - column), step, decay);
    }
    const std::ptrdiff_t cell = static_cast<std::ptrdiff_t>(row) * scan.columns + column;
    float* const y = scan.y + cell * channels + channel;
    if (scan.mask != nullptr && scan.mask[cell] == 0) {
      std::fill(y, y + count, 0.0f);
      continue;
    }
    const float* const x = scan.x.at(row, column) + channel;
    const std::ptrdiff_t map = static_cast<std::ptrdiff_t>(group) * N;
    const float* const b = whole(scan.b.at(row, column) + map, N, size, b_copy);
    const float* const c = whole(scan.c.at(row, column) + map, N, size, c_copy);
    float input[kTaskChannels];
    for (int i = 0; i < count; ++i) input[i] = step[place] * x[i];
    int i = 0;
    for (; i + kTogether <= count; i += kTogether) {
      advance_head<kTogether>(decay[place], input + i, b, c, size, states + i * static_cast<std::ptrdiff_t>(size),
                              y + i);
    }
    for (; i < count; ++i) {
      advance_head<1>(decay[place], input + i, b, c, size, states + i * static_cast<std::ptrdiff_t>(size), y + i);
    }
    for (i = 0; i < count; ++i) y[i] += scan.d[head] * x[i];
    if (scan.gate.data != nullptr) apply_gate(scan.gate.at(row, column) + channel, count, y);
  }
  store_states(states, count, N, size, scan.state + at);
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(selective_scan_task);
HWY_EXPORT(head_scan_task);

namespace {

int tiles(int channels) { return (channels + kTaskChannels - 1) / kTaskChannels; }

}  // namespace

int num_selective_scan_tasks(const ScanView& scan) { return scan.rows * tiles(scan.heads); }
int num_head_scan_tasks(const ScanView& scan) { return scan.rows * scan.heads * tiles(scan.head_size); }
void run_selective_scan_task(const ScanView& scan, int task) { HWY_DYNAMIC_DISPATCH(selective_scan_task)(scan, task); }
void run_head_scan_task(const ScanView& scan, int task) { HWY_DYNAMIC_DISPATCH(head_scan_task)(scan, task); }

}  // namespace reprise::kernels::cpu
#endif  // HWY_ONCE
