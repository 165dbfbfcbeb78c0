// Multi-head attention as most architectures have it: projections, norms of queries and keys, rotation, the cache's
// attention, output projection. A model takes the steps that it needs and puts its own between them. Private to
// `models`. Threads: immutable after construction.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/models/config.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/rope.h"

namespace reprise::internal {

struct AttentionSizes {
  int hidden_size;
  int heads;
  int kv_heads;
  int head_dim;

  // hidden_size, num_attention_heads, num_key_value_heads (else as many), head_dim (else hidden_size / heads).
  // Throws: corrupt_data for sizes that are not positive or do not divide.
  static AttentionSizes from(const Config& config);
};

struct AttentionBlock {
  AttentionSizes sizes;
  Linear q_proj;
  Linear k_proj;
  Linear v_proj;
  Linear o_proj;
  float scale;                            // of the scores
  std::shared_ptr<const Rope> rope = {};  // null: no positions
  std::optional<RmsNorm> q_norm = {};     // before the rotation: of each head, or, by its weight's size, of all
  std::optional<RmsNorm> k_norm = {};     //
  std::optional<float> softcap = {};      // of the scores
  std::optional<mlx::core::array> sinks = {};
  std::optional<mlx::core::Dtype> stored_dtype = {};  // of keys and values in a cache that starts empty

  // norm(x) through q, k and v, and their norms. x [B, L, E].
  Projections project(const mlx::core::array& x, const std::optional<Norm>& norm) const;
  // Rotates, stores, attends. Returns: [B, L, heads * head_dim], what o_proj takes.
  mlx::core::array attend(const Projections& projections, AttentionCache& cache, const Mask& mask) const;

  // All of it: o_proj(attention over norm(x)), and the same added to a residual. [B, L, E] → [B, L, E].
  mlx::core::array operator()(const mlx::core::array& x, const std::optional<Norm>& norm, AttentionCache& cache,
                              const Mask& mask) const;
  mlx::core::array add_to(const mlx::core::array& residual, const mlx::core::array& x, const std::optional<Norm>& norm,
                          AttentionCache& cache, const Mask& mask) const;
  // residual + output_norm(the same).
  mlx::core::array add_normed_to(const mlx::core::array& residual, const mlx::core::array& x,
                                 const std::optional<Norm>& norm, AttentionCache& cache, const Mask& mask,
                                 const RmsNorm& output_norm) const;

 private:
  AttentionOptions options(const Mask& mask) const;
  Projections unnormed(const mlx::core::array& x, const std::optional<Norm>& norm) const;
  // As attend(project(…)), but norms of single heads are a part of attention's operation.
  mlx::core::array attended(const mlx::core::array& x, const std::optional<Norm>& norm, AttentionCache& cache,
                            const Mask& mask) const;
};

struct AttentionBiases {
  bool qkv = false;
  bool output = false;
};

// `path`.q_proj, .k_proj, .v_proj, .o_proj, the scale head_dim^-1/2; without norms and rope.
AttentionBlock take_attention(WeightReader& weights, const std::string& path, const AttentionSizes& sizes,
                              const AttentionBiases& biases = {});

}  // namespace reprise::internal
