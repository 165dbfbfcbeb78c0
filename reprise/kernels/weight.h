// Weight matrices as models store them.
// Threads: values; arrays follow MLX's rule (an unevaluated array belongs to the thread that built it).
#pragma once

#include <memory>
#include <optional>
#include <variant>

#include "mlx/array.h"

namespace reprise {

// MLX's affine quantisation along the input axis: w = scale · q + bias per group.
struct QuantizedWeight {
  mlx::core::array packed;  // uint32 [out, in * bits / 32]
  mlx::core::array scales;  // [out, in / group_size]
  mlx::core::array biases;  // [out, in / group_size]
  int group_size = 64;      // 32, 64 or 128
  int bits = 4;             // 2, 3, 4, 5, 6 or 8
};

using DenseWeight = mlx::core::array;  // [out, in]
using Weight = std::variant<DenseWeight, QuantizedWeight>;

// An affine map y = x · weightᵀ + bias. Immutable, shared by a layer and the unevaluated operations that use it.
struct AffineMap {
  Weight weight;
  std::optional<mlx::core::array> bias = {};  // [out]

  int in() const;
  int out() const;
};
using AffineMapPtr = std::shared_ptr<const AffineMap>;

}  // namespace reprise
