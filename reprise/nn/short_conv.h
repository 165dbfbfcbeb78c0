// The short depthwise convolution of recurrent layers, which carries its last inputs from chunk to chunk.
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/short_conv.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

// Which columns of a padded batch hold tokens.
struct RealColumns {
  Mask mask = NoMask{};  // bool [B, L], false: padding; NoMask: all are real
  // Of right-padded rows: real columns from the first of the L on; may be more than L, or negative.
  std::optional<std::vector<int>> lengths = {};
};

using kernels::ConvActivation;
using kernels::ShortConvResult;

// output[t] = activation(bias + Σ_k weight[:, k] · input[t - K + 1 + k]), over the state's K - 1 inputs and then x,
// paddings read as 0.
struct ShortConv {
  mlx::core::array weight;                    // [C, K]
  std::optional<mlx::core::array> bias = {};  // [C]
  ConvActivation activation = ConvActivation::none;

  // x [B, L, C]; state none: zeros. Throws: invalid_argument for shapes that do not fit.
  ShortConvResult operator()(const mlx::core::array& x, const std::optional<mlx::core::array>& state,
                             const RealColumns& real = {}) const;
};

}  // namespace reprise
