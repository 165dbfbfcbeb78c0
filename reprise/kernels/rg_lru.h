// The real-gated linear recurrent unit (De et al., https://arxiv.org/abs/2402.19427): a recurrence over the columns of
// a chunk with a number per feature as its state. On the CPU a kernel of our own; on a GPU, and in reference.h, made of
// MLX's operations. States are in float32.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace reprise::kernels {

struct RgLruInputs {
  mlx::core::array x;               // [B, L, D]
  mlx::core::array input_gate;      // [B, L, D]: before its sigmoid
  mlx::core::array recurrent_gate;  // [B, L, D]: before its sigmoid
  mlx::core::array decay;           // float32 [D], ≥ 0: c · softplus(Λ)
  // bool [B, L]; false: padding, which leaves the state as it is and whose output means nothing. None: all are real.
  std::optional<mlx::core::array> real = {};
};

struct RgLruResult {
  mlx::core::array output;  // [B, L, D] in x's dtype
  mlx::core::array state;   // float32 [B, D]: of the last column
};

// h ← α h + √(1 - α²) · sigmoid(input_gate) · x with α = exp(-decay · sigmoid(recurrent_gate)); output h. A row whose
// state is all zeros has not begun: its first real column enters without the root.
// state: as in the result, none for zeros. Throws: invalid_argument for shapes that do not fit.
RgLruResult rg_lru(const RgLruInputs& inputs, const std::optional<mlx::core::array>& state);

}  // namespace reprise::kernels
