// The gated delta net's recurrence: what lies between its projections (Yang et al., https://arxiv.org/abs/2412.06464).
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/kernels/delta_rule.h"
#include "reprise/nn/short_conv.h"

namespace reprise {

struct GatedDeltaParams {
  ShortConv conv;  // of 2 Hk Dk + Hv Dv channels
  kernels::DeltaRuleParams rule;
};

struct GatedDeltaInputs {
  mlx::core::array qkv;  // [B, L, 2 Hk Dk + Hv Dv]: before the convolution
  mlx::core::array a;    // [B, L, Hv]
  mlx::core::array b;    // [B, L, Hv]
};

// Both or neither: none at the start.
struct GatedDeltaState {
  std::optional<mlx::core::array> conv;  // [B, K - 1, 2 Hk Dk + Hv Dv]
  std::optional<mlx::core::array> rule;  // float32 [B, Hv, Dv, Dk]
};

struct GatedDeltaResult {
  mlx::core::array output;  // [B, L, Hv, Dv]
  GatedDeltaState state;
};

// kernels::gated_delta_rule over the convolution of qkv. Columns of padding leave the state as it is.
// Throws: invalid_argument for shapes that do not fit.
GatedDeltaResult gated_delta(const GatedDeltaInputs& inputs, const GatedDeltaParams& params,
                             const GatedDeltaState& state, const RealColumns& real);

}  // namespace reprise
