// Mamba 2's layer as the architectures built on it share it (Dao and Gu, https://arxiv.org/abs/2405.21060). Private to
// `models`. Threads: immutable after construction.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "mlx/array.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/models/mamba_mixer.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/short_conv.h"
#include "reprise/nn/ssm.h"

namespace reprise::internal {

struct Mamba2Sizes {
  int hidden_size;
  int heads;
  int head_dim;
  int groups;  // of heads, which share b and c
  int states;  // N
  int conv_width;

  int channels() const { return heads * head_dim; }
  int maps() const { return groups * states; }  // of b, and of c
  int conv_channels() const { return channels() + 2 * maps(); }

  // Throws: corrupt_data for groups that do not divide heads, or sizes that no model has.
  void check() const;
};

// What becomes of the scan's result y with its gate.
enum class GateOrder {
  gate_then_norm,         // norm(silu(gate) · y)
  gate_then_group_norms,  // the same, each group of heads normed by itself
  norm_then_gate,         // silu(gate) · norm(y)
  gate_only               // silu(gate) · y
};

struct Mamba2Options {
  GateOrder order = GateOrder::gate_then_norm;
  float norm_eps = 1e-5f;
  float step_low = 0.0f;  // bounds of the scan's steps
  float step_high = std::numeric_limits<float>::infinity();
  bool in_bias = false;
  bool out_bias = false;
  bool conv_bias = true;
};

struct Mamba2Mixer {
  Mamba2Sizes sizes;
  Linear gate_proj;
  Linear conv_proj;
  Linear step_proj;
  ShortConv conv;
  std::shared_ptr<const HeadScan> scan;
  GateOrder order;
  std::optional<RmsNorm> norm = {};                        // of all, or of one group, then without weights
  std::optional<mlx::core::array> group_norm_weight = {};  // [channels]
  Linear out_proj;

  // mixer(norm(x)); the same added to a residual. x [B, L, E].
  mlx::core::array operator()(const mlx::core::array& x, const Norm& input_norm, ArraysCache& cache,
                              const RealColumns& real) const;
  mlx::core::array add_to(const mlx::core::array& residual, const mlx::core::array& x, const Norm& input_norm,
                          ArraysCache& cache, const RealColumns& real) const;

 private:
  mlx::core::array scanned(const mlx::core::array& x, const Norm& input_norm, ArraysCache& cache,
                           const RealColumns& real) const;
};

// From "time_step_limit", else none. Throws: corrupt_data unless it has two numbers, 0 ≤ low ≤ high.
void read_step_limits(const Config& config, Mamba2Options& options);

// `path`.in_proj, .conv1d, .A_log, .D, .dt_bias, .norm unless the order has none, .out_proj.
Mamba2Mixer take_mamba2_mixer(WeightReader& weights, const std::string& path, const Mamba2Sizes& sizes,
                              const Mamba2Options& options);

}  // namespace reprise::internal
