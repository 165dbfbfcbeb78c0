// Rotary positions as the kernels take them; nn::Rope makes these of the models' many kinds.
// Threads: immutable values.
#pragma once

#include <memory>
#include <vector>

namespace reprise::kernels {

struct RopeParams {
  int dims = 0;              // features rotated; those after it pass through
  bool traditional = false;  // pairs (2i, 2i+1) instead of (i, i + dims/2)
  float scale = 1.0f;        // multiplies positions
  float input_scale = 1.0f;  // multiplies x[…, :dims] first
  // dims / 2: pair i of a token at position p turns by (p · scale) · frequencies[i], computed in float32 as MLX does.
  std::shared_ptr<const std::vector<float>> frequencies;
};

}  // namespace reprise::kernels
