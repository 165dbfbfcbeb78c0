// Affine maps and token embeddings over dense or quantised weights.
// Threads: immutable after construction; evaluate the weights before another thread uses them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/kernels/weight.h"
#include "reprise/nn/norms.h"

namespace reprise {

// What fine-tuning adds to a map: y = row_scale · (W x + scale · (x a) b) + bias, without row_scale (DoRA's) and bias
// where there are none (Hu et al., https://arxiv.org/abs/2106.09685; Liu et al., https://arxiv.org/abs/2402.09353).
struct LowRank {
  mlx::core::array a;  // [in, rank]
  mlx::core::array b;  // [rank, out]
  float scale = 1.0f;
  std::optional<mlx::core::array> row_scale = {};  // [out]
};

class Linear {
 public:
  explicit Linear(Weight weight, std::optional<mlx::core::array> bias = {});  // bias [out]
  Linear(Weight weight, std::optional<mlx::core::array> bias, LowRank low_rank);

  // x [..., in] → [..., out] in x's dtype.
  mlx::core::array operator()(const mlx::core::array& x) const;

  // residual + (*this)(x), or residual + norm((*this)(x)), as one operation.
  mlx::core::array add_to(const mlx::core::array& residual, const mlx::core::array& x) const;
  mlx::core::array add_normed_to(const mlx::core::array& residual, const mlx::core::array& x,
                                 const RmsNorm& norm) const;

  const Weight& weight() const { return map_->weight; }
  // All of it, unless is_adapted().
  const AffineMapPtr& map() const { return map_; }
  bool is_adapted() const { return low_rank_ != nullptr; }
  const LowRank& low_rank() const { return *low_rank_; }  // Requires: is_adapted()

 private:
  friend std::vector<mlx::core::array> project(const mlx::core::array& x,
                                               const std::vector<std::reference_wrapper<const Linear>>& layers);
  // y of the map alone → y of all.
  mlx::core::array adapted(const mlx::core::array& y, const mlx::core::array& x) const;

  AffineMapPtr map_;
  std::shared_ptr<const LowRank> low_rank_;    // null: none
  std::optional<mlx::core::array> last_bias_;  // where low_rank_ scales rows, the map has none
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
  // low_rank as of the head: a [E, rank], b [rank, V], no row_scale.
  Embedding(Weight weight, mlx::core::Dtype dtype, const LowRank& low_rank);

  // ids of an integer dtype [B, L] → [B, L, E]. Requires: ids in [0, V).
  mlx::core::array operator()(const mlx::core::array& ids) const;

  // The same weight as an output head: [..., E] → logits [..., V] in the input's dtype.
  const Linear& head() const { return head_; }
  mlx::core::array as_linear(const mlx::core::array& x) const { return head_(x); }

 private:
  Linear head_;
  mlx::core::Dtype dtype_;
  std::optional<LowRank> rows_ = {};  // the same for rows: a [V, rank], b [rank, E]
};

}  // namespace reprise
