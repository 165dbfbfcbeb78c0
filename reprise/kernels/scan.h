// The recurrences of state space models, over the columns of a chunk, with a state that goes on from chunk to chunk. On
// the CPU these are our own kernels; on a GPU, and in reference.h, they are made of MLX's operations. Inside, all is
// float32. Letters b and c are the papers' B and C.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <limits>
#include <memory>
#include <optional>

#include "mlx/array.h"

namespace reprise::kernels {

struct ScanResult {
  mlx::core::array y;      // as x
  mlx::core::array state;  // float32: after the last column
};

// What one chunk brings to a scan.
struct ScanInputs {
  mlx::core::array x;      // [B, L, channels]
  mlx::core::array delta;  // before bias and softplus
  mlx::core::array b;
  mlx::core::array c;
  std::optional<mlx::core::array> gate = {};   // [B, L, channels]: y comes multiplied by silu(gate)
  std::optional<mlx::core::array> mask = {};   // bool [B, L], false: the state passes by unchanged, y means nothing
  std::optional<mlx::core::array> state = {};  // none: zeros
};

// Steps are Δ = min(max(softplus(delta + bias), low), high).
struct StepSizes {
  std::optional<mlx::core::array> bias = {};  // as delta's last axis
  float low = 0.0f;
  float high = std::numeric_limits<float>::infinity();
};

// Mamba's selective scan (Gu and Dao, https://arxiv.org/abs/2312.00752): every channel has N states of its own,
// h ← exp(Δ a) h + Δ x b; y = c · h + d x.
struct SelectiveScan {
  mlx::core::array a;  // float32 [channels, N], negative
  mlx::core::array d;  // float32 [channels]
  StepSizes steps = {};
};

// delta [B, L, channels]; b, c [B, L, N]; state [B, channels, N]. Throws: invalid_argument for shapes that do not fit.
ScanResult selective_scan(const ScanInputs& inputs, const std::shared_ptr<const SelectiveScan>& scan);

// Mamba 2's scan (Dao and Gu, https://arxiv.org/abs/2405.21060): heads of P channels share a decay, groups of heads
// share b and c. h ← exp(Δ a) h + Δ x bᵀ, a matrix [P, N] a head; y = h c + d x.
struct HeadScan {
  mlx::core::array a;  // float32 [heads], negative
  mlx::core::array d;  // float32 [heads]
  int groups = 1;      // a divisor of heads
  StepSizes steps = {};
};

// delta [B, L, heads]; b, c [B, L, groups * N]; state [B, heads, P, N]. Throws: as above.
ScanResult head_scan(const ScanInputs& inputs, const std::shared_ptr<const HeadScan>& scan);

}  // namespace reprise::kernels
