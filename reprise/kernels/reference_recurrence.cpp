// Recurrences made of MLX's operations.
#include <cmath>
#include <utility>
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

// Columns that are worked off at once; a power of two.
constexpr int kMostChunkColumns = 64;

// [B, L, H, D] → [B, H, chunks, columns, D], zeros behind the end.
mx::array in_chunks(const mx::array& x, int chunks, int columns) {
  const int fill = chunks * columns - x.shape(1);
  const mx::array rows = mx::swapaxes(x, 1, 2);
  const mx::array filled =
      mx::pad(rows, std::vector<std::pair<int, int>>{{0, 0}, {0, 0}, {0, fill}, {0, 0}}, number(0.0f));
  return mx::reshape(filled, {x.shape(0), x.shape(2), chunks, columns, x.shape(3)});
}

mx::array transposed(const mx::array& x) { return mx::swapaxes(x, -1, -2); }

// (1 + A)⁻¹ of strictly lower triangular matrices [..., C, C]: blocks on the diagonal of 1, 2, 4, … rows are inverted,
// each made of two smaller ones and what A has beside them.
mx::array inverse_of_one_plus(const mx::array& A) {
  const int C = A.shape(-1);
  const mx::array row = mx::expand_dims(mx::arange(C), 1);
  const mx::array col = mx::expand_dims(mx::arange(C), 0);
  mx::array inverse = mx::broadcast_to(mx::eye(C), A.shape());
  for (int width = 1; width < C; width *= 2) {
    const auto block = [&](const mx::array& i) { return mx::floor_divide(i, mx::array(width)); };
    const mx::array is_odd = mx::equal(mx::remainder(block(row), mx::array(2)), mx::array(1));
    const mx::array beside = mx::logical_and(is_odd, mx::equal(block(row), mx::add(block(col), mx::array(1))));
    const mx::array part = mx::where(beside, A, number(0.0f));
    inverse = mx::subtract(inverse, mx::matmul(mx::matmul(inverse, part), inverse));
  }
  return inverse;
}

}  // namespace

// In chunks (Yang et al., section 3.3). With Γ[t, i] = α_{i+1} … α_t and γ_t = α_1 … α_t, what column t of a chunk
// writes along its key is u_t = β_t (v_t - γ_t S k_t - Σ_{i<t} Γ[t, i] (k_i · k_t) u_i), where S is the state before
// the chunk: a triangular system, which one inverse solves for whatever S. Then o_t = γ_t S q_t + Σ_{i≤t} Γ[t, i] (k_i
// · q_t) u_i.
DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mx::array>& state) {
  const int B = inputs.qkv.shape(0);
  const int L = inputs.qkv.shape(1);
  const int Hk = params.key_heads;
  const int Hv = params.value_heads;
  const int Dk = params.key_dim;
  const int Dv = params.value_dim;
  int C = 1;
  while (C < L && C < kMostChunkColumns) C *= 2;
  const int chunks = (L + C - 1) / C;

  const mx::array qkv = as_float32(inputs.qkv);
  const auto heads = [&](int first, int count, int dim) {
    return mx::reshape(columns(qkv, first, first + count * dim), {B, L, count, dim});
  };
  const float scale = 1.0f / std::sqrt(static_cast<float>(Dk));
  const mx::array q = in_chunks(mx::repeat(unit(heads(0, Hk, Dk), scale), Hv / Hk, 2), chunks, C);
  const mx::array k = in_chunks(mx::repeat(unit(heads(Hk * Dk, Hk, Dk), 1.0f), Hv / Hk, 2), chunks, C);
  const mx::array v = in_chunks(heads(2 * Hk * Dk, Hv, Dv), chunks, C);

  const mx::array softplus = mx::logaddexp(mx::add(as_float32(inputs.a), params.dt_bias), number(0.0f));
  mx::array rate = mx::negative(mx::multiply(params.decay, softplus));  // log α
  mx::array write = mx::sigmoid(as_float32(inputs.b));
  if (inputs.real) {
    const mx::array real = mx::expand_dims(*inputs.real, -1);
    rate = mx::where(real, rate, number(0.0f));
    write = mx::where(real, write, number(0.0f));
  }
  const mx::array log_alpha = in_chunks(mx::expand_dims(rate, -1), chunks, C);  // [B, Hv, chunks, C, 1]
  const mx::array beta = in_chunks(mx::expand_dims(write, -1), chunks, C);
  const mx::array gamma = mx::exp(mx::cumsum(log_alpha, -2));
  // Each sum for itself: differences of long ones would lose digits.
  const mx::array earlier = mx::tri(C, C, -1, mx::bool_);
  const mx::array up_to = mx::tri(C, C, 0, mx::bool_);
  const mx::array sums = mx::cumsum(mx::where(earlier, log_alpha, number(0.0f)), -2);
  const mx::array between = mx::where(up_to, mx::exp(sums), number(0.0f));  // Γ

  const mx::array matches = mx::multiply(mx::multiply(beta, between), mx::matmul(k, transposed(k)));
  const mx::array solve =
      mx::multiply(inverse_of_one_plus(mx::where(earlier, matches, number(0.0f))), transposed(beta));
  const mx::array attends = mx::multiply(between, mx::matmul(q, transposed(k)));
  const mx::array q_decayed = mx::multiply(q, gamma);
  const mx::array k_decayed = mx::multiply(k, gamma);
  const auto last_row = [&](const mx::array& x) {
    return mx::slice(x, {0, 0, 0, C - 1, 0}, {B, Hv, chunks, C, x.shape(4)});
  };
  const mx::array k_to_end = mx::multiply(k, transposed(last_row(between)));
  const mx::array whole_decay = last_row(gamma);

  mx::array S = state ? as_float32(*state) : mx::zeros({B, Hv, Dv, Dk}, mx::float32);
  std::vector<mx::array> outputs;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const auto of_chunk = [&](const mx::array& x) {
      return mx::squeeze(mx::slice(x, {0, 0, chunk, 0, 0}, {B, Hv, chunk + 1, x.shape(3), x.shape(4)}), 2);
    };
    const mx::array rest = mx::subtract(of_chunk(v), mx::matmul(of_chunk(k_decayed), transposed(S)));
    const mx::array u = mx::matmul(of_chunk(solve), rest);  // [B, Hv, C, Dv]
    outputs.push_back(mx::add(mx::matmul(of_chunk(q_decayed), transposed(S)), mx::matmul(of_chunk(attends), u)));
    S = mx::add(mx::multiply(of_chunk(whole_decay), S), mx::matmul(transposed(u), of_chunk(k_to_end)));
  }
  const mx::array output = mx::slice(mx::concatenate(outputs, 2), {0, 0, 0, 0}, {B, Hv, L, Dv});
  return {mx::astype(mx::swapaxes(output, 1, 2), inputs.qkv.dtype()), S};
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
