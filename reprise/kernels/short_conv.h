// The short depthwise convolution of recurrent layers as one operation. On the CPU this is our own kernel; on a GPU,
// and in reference.h, it is made of MLX's operations.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"

namespace reprise::kernels {

enum class ConvActivation { none, silu };

struct ShortConvParams {
  mlx::core::array weight;                    // [C, K]
  std::optional<mlx::core::array> bias = {};  // [C]
  ConvActivation activation = ConvActivation::none;
};

struct ShortConvInputs {
  mlx::core::array x;                            // [B, L, C]
  std::optional<mlx::core::array> state = {};    // [B, K - 1, C]; none: zeros
  std::optional<mlx::core::array> mask = {};     // bool [B, L], false: padding
  std::optional<std::vector<int>> lengths = {};  // [B]: the state is that before column min(max(length, 0), L)
};

struct ShortConvResult {
  mlx::core::array output;  // [B, L, C], as x
  mlx::core::array state;   // [B, K - 1, C], as x: each row's last inputs, for the next chunk
};

// output[t] = activation(bias + Σ_k weight[:, k] · input[t - K + 1 + k]), over the state's K - 1 inputs and then x,
// paddings read as 0. Throws: invalid_argument for shapes that do not fit.
ShortConvResult short_conv(const ShortConvInputs& inputs, const ShortConvParams& params);

}  // namespace reprise::kernels
