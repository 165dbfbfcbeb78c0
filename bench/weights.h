// Random weights in the shapes of a transformer block, for the measuring programs.
// Threads: free functions; arrays are evaluated.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/linear.h"

namespace reprise::bench {

struct Shapes {
  const char* name;
  int hidden;
  int heads;
  int kv_heads;
  int head_dim;
  int mlp;
  int vocab;
};

inline constexpr Shapes kSmolLM2 = {"SmolLM2-135M", 576, 9, 3, 64, 1536, 49152};
inline constexpr Shapes kLlama8B = {"Llama-3-8B", 4096, 32, 8, 128, 14336, 128256};

// Quantised, scales and biases in float16.
AffineMapPtr random_map(int out, int in, int bits, int group_size);
std::size_t weight_bytes(const AffineMap& map);

// Uniform in [-1, 1), float32.
mlx::core::array random_rows(int rows, int cols);

// The linear maps of one block, with what belongs to them.
struct Block {
  std::vector<AffineMapPtr> qkv;
  AffineMapPtr o;
  AffineMapPtr gate;
  AffineMapPtr up;
  AffineMapPtr down;
  kernels::RmsNormParams norm;
};
Block random_block(const Shapes& shapes, int bits, int group_size);
// Numbers of weights.
double block_size(const Shapes& shapes);

}  // namespace reprise::bench
