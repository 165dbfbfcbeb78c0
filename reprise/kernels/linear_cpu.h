// Linear maps with what surrounds them, over float32 rows: what every linear operation on the CPU runs. Pointers and
// sizes, no MLX. Private to `kernels`. Work is spread over the pool's threads by output columns, and by rows where
// there are many; results do not depend on how.
#pragma once

#include <cstddef>
#include <span>

#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

// Row-contiguous, [rows, cols].
struct Rows {
  const float* data = nullptr;
  int rows = 0;
  int cols = 0;
};

struct Norm {
  const float* weight = nullptr;  // null: no norm
  float eps = 0.0f;
};

struct Map {
  WeightView weight;
  const float* bias = nullptr;  // [weight.rows], or null
};

struct LinearOutput {
  Map map;
  const float* residual = nullptr;  // [rows, map.weight.rows], added; or null
  Norm norm = {};                   // of the map's result, before the residual is added
  float* data = nullptr;            // the same shape, not the residual
};

// Each output = its norm(norm(x) · weightᵀ (+ bias)) (+ residual). Throws: bad_alloc.
void linear(const Rows& x, const Norm& norm, std::span<const LinearOutput> outputs, ThreadPool& pool);

enum class Activation { silu, gelu_tanh };

struct GatedMlp {
  Map gate;
  Map up;
  Map down;
  Activation activation = Activation::silu;
  Norm output_norm = {};
};

// out = output_norm(down(act(gate(norm(x))) · up(norm(x)))) (+ residual). out and residual [x.rows, down.weight.rows];
// out is neither x nor residual. Throws: bad_alloc.
void gated_mlp(const Rows& x, const Norm& norm, const GatedMlp& mlp, const float* residual, float* out,
               ThreadPool& pool);

// out [rows, cols] = norm(x).
void rms_norm(const Rows& x, const Norm& norm, float* out, ThreadPool& pool);

}  // namespace reprise::kernels::cpu
