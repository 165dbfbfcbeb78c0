// Feed-forward blocks.
// Threads: immutable after construction.
#pragma once

#include "mlx/array.h"
#include "reprise/kernels/linear.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"

namespace reprise {

// silu(gate) · up (Shazeer, https://arxiv.org/abs/2002.05202). Both [..., F] → [..., F].
mlx::core::array swiglu(const mlx::core::array& gate, const mlx::core::array& up);

using GateActivation = kernels::GateActivation;

// activation(gate) · up. Both [..., F] → [..., F].
mlx::core::array gated(const mlx::core::array& gate, const mlx::core::array& up, GateActivation activation);

// x · Φ(x), with the normal distribution's Φ (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415), or its
// approximation by tanh. x [..., F] → [..., F].
mlx::core::array gelu(const mlx::core::array& x);
mlx::core::array gelu_tanh(const mlx::core::array& x);

// down(activation(gate(x)) · up(x)): the gated feed-forward block of the Llama family.
struct GatedMlp {
  Linear gate_proj;
  Linear up_proj;
  Linear down_proj;
  GateActivation activation = GateActivation::silu;

  // x [..., E] → [..., E].
  mlx::core::array operator()(const mlx::core::array& x) const;

  // residual + (*this)(x), or + (*this)(norm(x)), as one operation. residual [..., E].
  mlx::core::array add_to(const mlx::core::array& residual, const mlx::core::array& x) const;
  mlx::core::array add_to(const mlx::core::array& residual, const RmsNorm& norm, const mlx::core::array& x) const;
  // residual + output_norm((*this)(norm(x))), likewise.
  mlx::core::array add_normed_to(const mlx::core::array& residual, const RmsNorm& norm, const mlx::core::array& x,
                                 const RmsNorm& output_norm) const;
};

}  // namespace reprise
