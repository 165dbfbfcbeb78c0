// Recurrences made of MLX's operations.
#include <cmath>
#include <vector>

#include "mlx/ops.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

mx::array as_float32(const mx::array& x) { return mx::astype(x, mx::float32); }

mx::array number(float value) { return mx::array(value); }

// Unit length over the last axis, times `scale`.
mx::array unit(const mx::array& x, float scale) {
  const mx::array square = mx::sum(mx::square(x), -1, /*keepdims=*/true);
  return mx::multiply(x, mx::multiply(number(scale), mx::rsqrt(mx::add(square, number(1e-6f)))));
}

mx::array columns(const mx::array& x, int first, int last) {
  mx::Shape start(x.ndim(), 0);
  mx::Shape stop = x.shape();
  start.back() = first;
  stop.back() = last;
  return mx::slice(x, start, stop);
}

// [B, L, ...] → column t [B, ...].
mx::array column(const mx::array& x, int t) {
  mx::Shape start(x.ndim(), 0);
  mx::Shape stop = x.shape();
  start[1] = t;
  stop[1] = t + 1;
  return mx::squeeze(mx::slice(x, start, stop), 1);
}

}  // namespace

DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mx::array>& state) {
  const int B = inputs.qkv.shape(0);
  const int L = inputs.qkv.shape(1);
  const int Hk = params.key_heads;
  const int Hv = params.value_heads;
  const int Dk = params.key_dim;
  const int Dv = params.value_dim;
  const mx::array qkv = as_float32(inputs.qkv);
  const auto heads = [&](int first, int count, int dim) {
    return mx::reshape(columns(qkv, first, first + count * dim), {B, L, count, dim});
  };
  const mx::array q = mx::repeat(unit(heads(0, Hk, Dk), 1.0f / std::sqrt(static_cast<float>(Dk))), Hv / Hk, 2);
  const mx::array k = mx::repeat(unit(heads(Hk * Dk, Hk, Dk), 1.0f), Hv / Hk, 2);
  const mx::array v = heads(2 * Hk * Dk, Hv, Dv);
  const mx::array softplus = mx::logaddexp(mx::add(as_float32(inputs.a), params.dt_bias), number(0.0f));
  mx::array keep = mx::exp(mx::negative(mx::multiply(params.decay, softplus)));
  mx::array beta = mx::sigmoid(as_float32(inputs.b));
  if (inputs.real) {
    const mx::array real = mx::expand_dims(*inputs.real, -1);
    keep = mx::where(real, keep, number(1.0f));
    beta = mx::where(real, beta, number(0.0f));
  }
  mx::array S = state ? as_float32(*state) : mx::zeros({B, Hv, Dv, Dk}, mx::float32);
  std::vector<mx::array> outputs;
  for (int t = 0; t < L; ++t) {
    const mx::array key = mx::expand_dims(column(k, t), -2);    // [B, Hv, 1, Dk]
    const mx::array value = mx::expand_dims(column(v, t), -1);  // [B, Hv, Dv, 1]
    const mx::array query = mx::expand_dims(column(q, t), -1);  // [B, Hv, Dk, 1]
    const mx::array write = mx::reshape(column(beta, t), {B, Hv, 1, 1});
    S = mx::multiply(S, mx::reshape(column(keep, t), {B, Hv, 1, 1}));
    const mx::array read = mx::sum(mx::multiply(S, key), -1, /*keepdims=*/true);
    S = mx::add(S, mx::multiply(mx::multiply(write, mx::subtract(value, read)), key));
    outputs.push_back(mx::squeeze(mx::matmul(S, query), -1));
  }
  return {mx::astype(mx::stack(outputs, 1), inputs.qkv.dtype()), S};
}

// h_t = α_t h_{t-1} + u_t for all t by doubling: after a step of width w, u_t is what the columns t - 2w + 1 … t add.
RgLruResult rg_lru(const RgLruInputs& inputs, const std::optional<mx::array>& state) {
  const int B = inputs.x.shape(0);
  const int L = inputs.x.shape(1);
  const int D = inputs.x.shape(2);
  const mx::array h0 = state ? as_float32(*state) : mx::zeros({B, D}, mx::float32);
  const mx::array rate = mx::negative(mx::multiply(inputs.decay, mx::sigmoid(as_float32(inputs.recurrent_gate))));
  mx::array alpha = mx::exp(rate);
  mx::array root = mx::sqrt(mx::negative(mx::expm1(mx::multiply(number(2.0f), rate))));
  const mx::array real = inputs.real ? *inputs.real : mx::full({B, L}, true);
  const mx::array first = mx::argmax(mx::astype(real, mx::int32), 1, /*keepdims=*/true);
  const mx::array starts = mx::logical_and(mx::equal(mx::astype(mx::arange(L), mx::uint32), first),
                                           mx::logical_not(mx::any(mx::not_equal(h0, number(0.0f)), 1, true)));
  root = mx::where(mx::expand_dims(starts, -1), number(1.0f), root);
  mx::array u = mx::multiply(root, mx::multiply(mx::sigmoid(as_float32(inputs.input_gate)), as_float32(inputs.x)));
  if (inputs.real) {
    alpha = mx::where(mx::expand_dims(real, -1), alpha, number(1.0f));
    u = mx::where(mx::expand_dims(real, -1), u, number(0.0f));
  }
  for (int width = 1; width < L; width *= 2) {
    const auto earlier = [&](const mx::array& x, float before) {
      const mx::array filled = mx::full({B, width, D}, before);
      return mx::concatenate({filled, mx::slice(x, {0, 0, 0}, {B, L - width, D})}, 1);
    };
    u = mx::add(u, mx::multiply(alpha, earlier(u, 0.0f)));
    alpha = mx::multiply(alpha, earlier(alpha, 1.0f));
  }
  const mx::array h = mx::add(u, mx::multiply(alpha, mx::expand_dims(h0, 1)));
  return {mx::astype(h, inputs.x.dtype()), column(h, L - 1)};
}

}  // namespace reprise::kernels::reference
