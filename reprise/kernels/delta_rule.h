// The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464): a recurrence over the columns of a chunk with a
// matrix per head as its state. On the CPU a kernel of our own; on a GPU, and in reference.h, made of MLX's operations.
// Sums and states are in float32.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace reprise::kernels {

// Value head h reads the queries and keys of key head h / (value_heads / key_heads).
struct DeltaRuleParams {
  int key_heads;    // Hk, which divides Hv
  int value_heads;  // Hv
  int key_dim;      // Dk
  int value_dim;    // Dv
  // A head keeps α = exp(-decay · softplus(a + dt_bias)) of its state from column to column.
  mlx::core::array decay;    // float32 [Hv], ≥ 0
  mlx::core::array dt_bias;  // float32 [Hv]
};

struct DeltaRuleInputs {
  mlx::core::array qkv;  // [B, L, 2 Hk Dk + Hv Dv]: queries and keys of all key heads, then values
  mlx::core::array a;    // [B, L, Hv]: how fast to forget
  mlx::core::array b;    // [B, L, Hv]: β = sigmoid(b), how much of a value to write
  // bool [B, L]; false: padding, which leaves the state as it is and whose output means nothing. None: all are real.
  std::optional<mlx::core::array> real = {};
};

struct DeltaRuleResult {
  mlx::core::array output;  // [B, L, Hv, Dv] in qkv's dtype
  mlx::core::array state;   // float32 [B, Hv, Dv, Dk]: of the last column
};

// With q and k of unit length (‖x‖² + 1e-6), per head and column: S ← α S, S ← S + β (v - S k) kᵀ, output S q / √Dk.
// state: as in the result, none for zeros. Throws: invalid_argument for shapes that do not fit.
DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mlx::core::array>& state);

}  // namespace reprise::kernels
