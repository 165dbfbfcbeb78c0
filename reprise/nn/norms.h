// Normalisation layers.
// Threads: immutable after construction.
#pragma once

#include "mlx/array.h"
#include "mlx/fast.h"

namespace reprise {

// Root-mean-square norm over the last axis (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
class RmsNorm {
 public:
  RmsNorm(mlx::core::array weight, float eps) : weight_(std::move(weight)), eps_(eps) {}  // weight [E]

  // x [..., E] → the same shape and dtype.
  mlx::core::array operator()(const mlx::core::array& x) const { return mlx::core::fast::rms_norm(x, weight_, eps_); }

 private:
  mlx::core::array weight_;
  float eps_;
};

}  // namespace reprise
