// Mamba's layer as the architectures built on it share it (Gu and Dao, https://arxiv.org/abs/2312.00752). Private to
// `models`. Threads: immutable after construction.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "mlx/array.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/models/config.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/linear.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/short_conv.h"
#include "reprise/nn/ssm.h"

namespace reprise::internal {

struct MambaSizes {
  int hidden_size;
  int channels;   // of the convolution and the scan
  int states;     // N of each channel
  int step_rank;  // of the step sizes, before they are projected to all channels
  int conv_width;
};

// The config's number; where it is absent or "auto", a sixteenth of the hidden size.
int step_rank(const Config& config, const std::string& key, int hidden_size);

// Throws: corrupt_data for a size, made of numbers of a config, that no model has.
int checked_size(std::int64_t size);

// The cache's slots: the convolution's last inputs and the scan's state.
constexpr int kMambaSlots = 2;

struct MambaMixer {
  Linear x_proj;
  Linear gate_proj;
  ShortConv conv;
  Linear step_down_proj;
  Linear b_proj;
  Linear c_proj;
  std::optional<RmsNorm> step_norm = {};
  std::optional<RmsNorm> b_norm = {};
  std::optional<RmsNorm> c_norm = {};
  Linear step_proj;  // its bias is in the scan
  std::shared_ptr<const SelectiveScan> scan;
  Linear out_proj;

  // h + mixer(norm(h)). h [B, L, E].
  mlx::core::array add_to(const mlx::core::array& h, const Norm& norm, ArraysCache& cache,
                          const RealColumns& real) const;
};

struct MambaBiases {
  bool projections = false;
  bool conv = true;
};

// `path`.in_proj, .conv1d, .x_proj, .dt_proj, .A_log, .D, .out_proj; without norms.
MambaMixer take_mamba_mixer(WeightReader& weights, const std::string& path, const MambaSizes& sizes,
                            const MambaBiases& biases);

// Parts that Mamba 2 has too: `path`.weight and .bias; `path`.A_log as decay rates.
ShortConv take_ssm_conv(WeightReader& weights, const std::string& path, int channels, int width, bool bias);
mlx::core::array take_decay_rates(WeightReader& weights, const std::string& path, const mlx::core::Shape& shape);

}  // namespace reprise::internal
