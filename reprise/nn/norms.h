// Normalisation layers.
// Threads: immutable after construction.
#pragma once

#include <utility>

#include "mlx/array.h"
#include "reprise/kernels/linear.h"

namespace reprise {

// Root-mean-square norm over the last axis (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
class RmsNorm {
 public:
  RmsNorm(mlx::core::array weight, float eps) : params_{std::move(weight), eps} {}  // weight [E]

  // x [..., E] → the same shape and dtype.
  mlx::core::array operator()(const mlx::core::array& x) const { return kernels::rms_norm(x, params_); }

  // For operations that norm their input themselves.
  const kernels::RmsNormParams& params() const { return params_; }

 private:
  kernels::RmsNormParams params_;
};

}  // namespace reprise
