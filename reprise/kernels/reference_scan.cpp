#include <algorithm>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

mx::array wide(const mx::array& x) { return mx::astype(x, mx::float32); }

mx::array silu(const mx::array& x) { return mx::multiply(x, mx::sigmoid(x)); }

// [B, L, heads or channels]; 0 where the state passes by.
mx::array step_sizes(const ScanInputs& inputs, const StepSizes& steps) {
  mx::array delta = wide(inputs.delta);
  if (steps.bias) delta = mx::add(delta, wide(*steps.bias));
  delta = mx::logaddexp(delta, mx::array(0.0f));
  delta = mx::minimum(mx::maximum(delta, mx::array(steps.low)), mx::array(steps.high));
  return inputs.mask ? mx::where(mx::expand_dims(*inputs.mask, -1), delta, mx::array(0.0f)) : delta;
}

// Columns [first, last) of x [B, L, …].
mx::array columns(const mx::array& x, int first, int last) {
  mx::Shape start(x.ndim(), 0);
  mx::Shape stop = x.shape();
  start[1] = first;
  stop[1] = last;
  return mx::slice(x, std::move(start), std::move(stop));
}

mx::array finished(mx::array y, const ScanInputs& inputs) {
  if (inputs.gate) y = mx::multiply(y, silu(wide(*inputs.gate)));
  return mx::astype(y, inputs.x.dtype());
}

// h_t = decay_t · h_{t-1} + input_t along axis 1, in place of a loop: after the step of width w each column holds what
// its last 2w inputs leave. Both [B, L, …].
mx::array accumulate(mx::array input, mx::array decay) {
  const int L = input.shape(1);
  for (int width = 1; width < L; width *= 2) {
    const auto shifted = [&](const mx::array& x) { return columns(x, 0, L - width); };
    const mx::array late = columns(decay, width, L);
    input = mx::concatenate(
        {columns(input, 0, width), mx::add(columns(input, width, L), mx::multiply(late, shifted(input)))}, 1);
    decay = mx::concatenate({columns(decay, 0, width), mx::multiply(late, shifted(decay))}, 1);
  }
  return input;
}

// exp(Σ of log decays over (s, t]) for s ≤ t, else 0. x [B, heads, L] → [B, heads, L, L]. Sums are made one by one:
// differences of running sums would lose digits.
mx::array decays_between(const mx::array& x) {
  const int L = x.shape(-1);
  const mx::array rows = mx::broadcast_to(mx::expand_dims(x, -1), {x.shape(0), x.shape(1), L, L});
  return mx::tril(mx::exp(mx::cumsum(mx::tril(rows, -1), -2)), 0);
}

}  // namespace

ScanResult selective_scan(const ScanInputs& inputs, const std::shared_ptr<const SelectiveScan>& scan) {
  constexpr int kChunk = 32;
  const int B = inputs.x.shape(0);
  const int L = inputs.x.shape(1);
  const int N = scan->a.shape(1);
  const mx::array x = wide(inputs.x);
  const mx::array delta = step_sizes(inputs, scan->steps);
  mx::array state = inputs.state ? wide(*inputs.state) : mx::zeros({B, x.shape(2), N}, mx::float32);
  std::vector<mx::array> ys;
  for (int first = 0; first < L; first += kChunk) {
    const int last = std::min(first + kChunk, L);
    const auto part = [&](const mx::array& all) { return wide(columns(all, first, last)); };
    const mx::array decay = mx::exp(mx::multiply(mx::expand_dims(part(delta), -1), scan->a));
    mx::array input =
        mx::multiply(mx::expand_dims(mx::multiply(part(delta), part(x)), -1), mx::expand_dims(part(inputs.b), 2));
    const mx::array carried = mx::multiply(columns(decay, 0, 1), mx::expand_dims(state, 1));
    input = mx::concatenate({mx::add(columns(input, 0, 1), carried), columns(input, 1, last - first)}, 1);
    const mx::array states = accumulate(input, decay);
    ys.push_back(mx::squeeze(mx::matmul(states, mx::expand_dims(part(inputs.c), -1)), -1));
    state = mx::squeeze(columns(states, last - first - 1, last - first), 1);
  }
  const mx::array y = mx::add(mx::concatenate(ys, 1), mx::multiply(x, scan->d));
  return {finished(y, inputs), state};
}

// The paper's blocks: within a block a masked matrix of pairs of columns, between blocks the state.
ScanResult head_scan(const ScanInputs& inputs, const std::shared_ptr<const HeadScan>& scan) {
  constexpr int kChunk = 64;
  const int B = inputs.x.shape(0);
  const int L = inputs.x.shape(1);
  const int heads = scan->a.shape(0);
  const int P = inputs.x.shape(2) / heads;
  const int N = inputs.b.shape(2) / scan->groups;
  const mx::array x = mx::reshape(wide(inputs.x), {B, L, heads, P});
  const mx::array delta = step_sizes(inputs, scan->steps);
  mx::array state = inputs.state ? wide(*inputs.state) : mx::zeros({B, heads, P, N}, mx::float32);
  std::vector<mx::array> ys;
  for (int first = 0; first < L; first += kChunk) {
    const int last = std::min(first + kChunk, L);
    const int length = last - first;
    const auto by_head = [&](const mx::array& all) {  // [B, heads, length, N]
      const mx::array grouped = mx::reshape(wide(columns(all, first, last)), {B, length, scan->groups, N});
      return mx::swapaxes(mx::repeat(grouped, heads / scan->groups, 2), 1, 2);
    };
    const mx::array b = by_head(inputs.b);
    const mx::array c = by_head(inputs.c);
    const mx::array step = mx::swapaxes(columns(delta, first, last), 1, 2);  // [B, heads, length]
    const mx::array log_decay = mx::multiply(step, mx::reshape(scan->a, {heads, 1}));
    const mx::array input =
        mx::multiply(mx::expand_dims(step, -1), mx::swapaxes(columns(x, first, last), 1, 2));  // [B, heads, length, P]
    const mx::array decays = decays_between(log_decay);
    const mx::array within = mx::matmul(mx::multiply(mx::matmul(c, mx::swapaxes(b, -1, -2)), decays), input);
    const mx::array since_start = mx::expand_dims(mx::exp(mx::cumsum(log_decay, -1)), -1);
    const mx::array carried = mx::multiply(since_start, mx::matmul(c, mx::swapaxes(state, -1, -2)));
    ys.push_back(mx::swapaxes(mx::add(within, carried), 1, 2));
    const mx::array to_end =
        mx::reshape(mx::slice(decays, {0, 0, length - 1, 0}, {B, heads, length, length}), {B, heads, length, 1});
    const mx::array whole = mx::slice(since_start, {0, 0, length - 1, 0}, {B, heads, length, 1});
    state = mx::add(mx::multiply(whole, state), mx::matmul(mx::swapaxes(mx::multiply(input, to_end), -1, -2), b));
  }
  const mx::array y = mx::add(mx::concatenate(ys, 1), mx::multiply(x, mx::reshape(scan->d, {heads, 1})));
  return {finished(mx::reshape(y, inputs.x.shape()), inputs), state};
}

}  // namespace reprise::kernels::reference
