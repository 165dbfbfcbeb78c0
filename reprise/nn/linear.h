// Affine maps and token embeddings over dense or quantised weights.
// Threads: immutable after construction; evaluate the weights before another thread uses them.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/kernels/weight.h"
#include "reprise/nn/norms.h"

namespace reprise {

class Linear {
 public:
  explicit Linear(Weight weight, std::optional<mlx::core::array> bias = {});  // bias [out]

  // x [..., in] → [..., out] in x's dtype.
  mlx::core::array operator()(const mlx::core::array& x) const;

  // residual + (*this)(x), or residual + norm((*this)(x)), as one operation.
  mlx::core::array add_to(const mlx::core::array& residual, const mlx::core::array& x) const;
  mlx::core::array add_normed_to(const mlx::core::array& residual, const mlx::core::array& x,
                                 const RmsNorm& norm) const;

  const Weight& weight() const { return map_->weight; }
  const AffineMapPtr& map() const { return map_; }

 private:
  AffineMapPtr map_;
};

using LinearRefs = std::vector<std::reference_wrapper<const Linear>>;

// layer(norm(x)) for each of several layers, in their order, reading x once; one operation unless it is a LayerNorm.
std::vector<mlx::core::array> project(const mlx::core::array& x, const Norm& norm, const LinearRefs& layers);

// layer(x) for each of several layers, as one operation.
std::vector<mlx::core::array> project(const mlx::core::array& x, const LinearRefs& layers);

class Embedding {
 public:
  // weight [V, E]; rows come out in `dtype`.
  Embedding(Weight weight, mlx::core::Dtype dtype);

  // ids of an integer dtype [B, L] → [B, L, E]. Requires: ids in [0, V).
  mlx::core::array operator()(const mlx::core::array& ids) const;

  // The same weight as an output head: [..., E] → logits [..., V] in the input's dtype.
  const Linear& head() const { return head_; }
  mlx::core::array as_linear(const mlx::core::array& x) const { return head_(x); }

 private:
  Linear head_;
  mlx::core::Dtype dtype_;
};

}  // namespace reprise
