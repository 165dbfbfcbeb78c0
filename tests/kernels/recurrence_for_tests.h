// The recurrences as plain float64 loops, and inputs for them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/kernels/delta_rule.h"
#include "reprise/kernels/rg_lru.h"

namespace reprise::test {

using Doubles = std::vector<double>;

inline Doubles doubles(const mlx::core::array& a) {
  auto x = mlx::core::contiguous(mlx::core::astype(a, mlx::core::float32));
  mlx::core::eval(x);
  return Doubles(x.data<float>(), x.data<float>() + x.size());
}

// Standard normal values times `scale`.
inline mlx::core::array random_array(const mlx::core::Shape& shape, std::uint64_t seed, float scale = 1.0f) {
  auto x = mlx::core::multiply(mlx::core::random::normal(shape, mlx::core::float32, mlx::core::random::key(seed)),
                               mlx::core::array(scale));
  mlx::core::eval(x);
  return x;
}

// One true or false a column.
inline mlx::core::array bool_array(const std::vector<std::vector<bool>>& rows) {
  std::vector<std::uint8_t> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  const mlx::core::Shape shape = {static_cast<int>(rows.size()), static_cast<int>(rows[0].size())};
  auto x = mlx::core::astype(mlx::core::array(flat.data(), shape, mlx::core::uint8), mlx::core::bool_);
  mlx::core::eval(x);
  return x;
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return x > 30.0 ? x : std::log1p(std::exp(x)); }

struct Recurred {
  Doubles output;
  Doubles state;
};

// Outputs of padding are left 0.
inline Recurred delta_rule_loop(const kernels::DeltaRuleInputs& inputs, const kernels::DeltaRuleParams& p,
                                const std::optional<mlx::core::array>& state) {
  const int B = inputs.qkv.shape(0), L = inputs.qkv.shape(1);
  const int Hk = p.key_heads, Hv = p.value_heads, Dk = p.key_dim, Dv = p.value_dim;
  const int C = 2 * Hk * Dk + Hv * Dv;
  const Doubles qkv = doubles(inputs.qkv), a = doubles(inputs.a), b = doubles(inputs.b);
  const Doubles decay = doubles(p.decay), dt_bias = doubles(p.dt_bias);
  const Doubles real = inputs.real ? doubles(*inputs.real) : Doubles(static_cast<std::size_t>(B * L), 1.0);
  const auto at = [](int i) { return static_cast<std::size_t>(i); };
  Recurred result{Doubles(at(B * L * Hv * Dv)), state ? doubles(*state) : Doubles(at(B * Hv * Dv * Dk))};
  for (int row = 0; row < B; ++row) {
    for (int t = 0; t < L; ++t) {
      if (real[at(row * L + t)] == 0.0) continue;
      const double* x = qkv.data() + (row * L + t) * C;
      for (int h = 0; h < Hv; ++h) {
        const double* q = x + h / (Hv / Hk) * Dk;
        const double* k = q + Hk * Dk;
        const double* v = x + 2 * Hk * Dk + h * Dv;
        double qq = 1e-6, kk = 1e-6;
        for (int i = 0; i < Dk; ++i) {
          qq += q[i] * q[i];
          kk += k[i] * k[i];
        }
        const int gate = (row * L + t) * Hv + h;
        const double alpha = std::exp(-decay[at(h)] * softplus(a[at(gate)] + dt_bias[at(h)]));
        const double beta = sigmoid(b[at(gate)]);
        for (int j = 0; j < Dv; ++j) {
          double* S = result.state.data() + ((row * Hv + h) * Dv + j) * Dk;
          double read = 0.0;
          for (int i = 0; i < Dk; ++i) read += (S[i] *= alpha) * k[i] / std::sqrt(kk);
          double out = 0.0;
          for (int i = 0; i < Dk; ++i) {
            S[i] += beta * (v[j] - read) * k[i] / std::sqrt(kk);
            out += S[i] * q[i] / std::sqrt(qq * Dk);
          }
          result.output[at(gate * Dv + j)] = out;
        }
      }
    }
  }
  return result;
}

inline Recurred rg_lru_loop(const kernels::RgLruInputs& inputs, const std::optional<mlx::core::array>& state) {
  const int B = inputs.x.shape(0), L = inputs.x.shape(1), D = inputs.x.shape(2);
  const Doubles x = doubles(inputs.x), decay = doubles(inputs.decay);
  const Doubles input_gate = doubles(inputs.input_gate), recurrent_gate = doubles(inputs.recurrent_gate);
  const Doubles real = inputs.real ? doubles(*inputs.real) : Doubles(static_cast<std::size_t>(B * L), 1.0);
  const auto at = [](int i) { return static_cast<std::size_t>(i); };
  Recurred result{Doubles(at(B * L * D)), state ? doubles(*state) : Doubles(at(B * D))};
  for (int row = 0; row < B; ++row) {
    bool begun = false;
    for (int i = 0; i < D; ++i) begun = begun || result.state[at(row * D + i)] != 0.0;
    for (int t = 0; t < L; ++t) {
      if (real[at(row * L + t)] == 0.0) continue;
      for (int i = 0; i < D; ++i) {
        const auto n = at((row * L + t) * D + i);
        double& h = result.state[at(row * D + i)];
        const double alpha = std::exp(-decay[at(i)] * sigmoid(recurrent_gate[n]));
        const double root = begun ? std::sqrt(1.0 - alpha * alpha) : 1.0;
        h = alpha * h + root * sigmoid(input_gate[n]) * x[n];
        result.output[n] = h;
      }
      begun = true;
    }
  }
  return result;
}

}  // namespace reprise::test
