// The gated delta net as a block: projections, short convolution, recurrence, gated norm, output projection. Private to
// `models`. Yang et al., https://arxiv.org/abs/2412.06464. Threads: immutable after construction.
#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/models/config.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/gated_delta.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/short_conv.h"

namespace reprise::internal {

struct GatedDeltaSizes {
  int hidden_size;
  int key_heads;
  int value_heads;  // a multiple of key_heads
  int key_dim;
  int value_dim;
  int conv_width;

  // hidden_size, linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim,
  // linear_conv_kernel_dim. Throws: corrupt_data for sizes that are not positive or do not divide.
  static GatedDeltaSizes from(const Config& config);

  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }  // of the convolution
};

struct GatedDeltaBlock {
  static constexpr int kSlots = 2;  // of its cache: inputs of the convolution, the rule's state

  Linear in_proj_qkv;
  Linear in_proj_z;
  Linear in_proj_b;
  Linear in_proj_a;
  GatedDeltaParams delta;
  RmsNorm norm;  // of each head's output
  Linear out_proj;

  // residual + out_proj(silu(z) · norm(delta(…))) over input_norm(residual). [B, L, E] → [B, L, E].
  mlx::core::array add_to(const mlx::core::array& residual, const Norm& input_norm, ArraysCache& cache,
                          const RealColumns& real) const;
};

// `path`.in_proj_qkv, .in_proj_z, .in_proj_b, .in_proj_a, or, by key heads, .in_proj_qkvz and .in_proj_ba; .conv1d,
// .A_log, .dt_bias, .norm, .out_proj.
GatedDeltaBlock take_gated_delta(WeightReader& weights, const std::string& path, const GatedDeltaSizes& sizes,
                                 float norm_eps);

// Rows of `path`.weight, .scales, .biases and .bias that are stored group by group, in each group sizes[i] rows of map
// i after those of map i - 1, become all rows of the first map, then of the second, …. Rows of another number stay as
// they are: whoever takes them says what is wrong.
void ungroup_rows(WeightReader& weights, const std::string& path, int groups, const std::vector<int>& sizes);

}  // namespace reprise::internal
