// Normalisation layers.
// Threads: immutable after construction.
#pragma once

#include <optional>
#include <utility>
#include <variant>

#include "mlx/array.h"
#include "mlx/fast.h"
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

// Norm by mean and variance over the last axis (Ba et al., https://arxiv.org/abs/1607.06450).
class LayerNorm {
 public:
  // weight, bias [E]; without either there is no such factor or term.
  LayerNorm(std::optional<mlx::core::array> weight, std::optional<mlx::core::array> bias, float eps)
      : weight_(std::move(weight)), bias_(std::move(bias)), eps_(eps) {}

  // x [..., E] → the same shape and dtype.
  mlx::core::array operator()(const mlx::core::array& x) const {
    return mlx::core::fast::layer_norm(x, weight_, bias_, eps_);
  }

 private:
  std::optional<mlx::core::array> weight_;
  std::optional<mlx::core::array> bias_;
  float eps_;
};

using Norm = std::variant<RmsNorm, LayerNorm>;

inline mlx::core::array apply(const Norm& norm, const mlx::core::array& x) {
  return std::visit([&](const auto& layer) { return layer(x); }, norm);
}

}  // namespace reprise
