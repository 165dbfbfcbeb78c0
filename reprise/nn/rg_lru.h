// The real-gated linear recurrent unit (De et al., https://arxiv.org/abs/2402.19427) with its block-diagonal gates.
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/kernels/rg_lru.h"
#include "reprise/nn/short_conv.h"

namespace reprise {

using RgLruResult = kernels::RgLruResult;

// D features in H blocks of d = D / H.
struct RgLruParams {
  mlx::core::array input_gate_weight;      // [H, d, d]: x of a block, as a row, times it
  mlx::core::array input_gate_bias;        // [H, d]
  mlx::core::array recurrent_gate_weight;  // [H, d, d]
  mlx::core::array recurrent_gate_bias;    // [H, d]
  mlx::core::array decay;                  // float32 [D]: c · softplus(Λ)
};

// kernels::rg_lru with gates made of x [B, L, D]. Columns of padding leave the state as it is. state: float32 [B, D],
// none at the start. Throws: invalid_argument for shapes that do not fit.
RgLruResult rg_lru(const mlx::core::array& x, const RgLruParams& params, const std::optional<mlx::core::array>& state,
                   const RealColumns& real = {});

}  // namespace reprise
