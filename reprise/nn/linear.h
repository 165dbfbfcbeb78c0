// Affine maps and token embeddings over dense or quantised weights.
// Threads: immutable after construction; evaluate the weights before another thread uses them.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/kernels/weight.h"

namespace reprise {

// x [..., in] · weightᵀ → [..., out] in x's dtype.
mlx::core::array multiply_transposed(const mlx::core::array& x, const Weight& weight);

class Linear {
 public:
  explicit Linear(Weight weight, std::optional<mlx::core::array> bias = {});  // bias [out]

  // x [..., in] → [..., out] in x's dtype.
  mlx::core::array operator()(const mlx::core::array& x) const;

  const Weight& weight() const { return weight_; }

 private:
  Weight weight_;
  std::optional<mlx::core::array> bias_;
};

class Embedding {
 public:
  // weight [V, E]; rows come out in `dtype`.
  Embedding(Weight weight, mlx::core::Dtype dtype);

  // ids int32 [B, L] → [B, L, E]. Ids must lie in [0, V): MLX does not check them.
  mlx::core::array operator()(const mlx::core::array& ids) const;

  // The same weight as the output head: x [B, L, E] → logits [B, L, V] in x's dtype.
  mlx::core::array as_linear(const mlx::core::array& x) const;

 private:
  Weight weight_;
  mlx::core::Dtype dtype_;
};

}  // namespace reprise
