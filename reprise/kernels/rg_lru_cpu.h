// The real-gated linear recurrent unit by pointers and sizes, no MLX. Private to `kernels`. Every feature goes its own
// way, so that results depend neither on the threads nor on how columns are cut into chunks.
// Threads: free functions.
#pragma once

#include <cstdint>

#include "reprise/base/thread_pool.h"

namespace reprise::kernels::cpu {

// Each array lies end to end. Names as in rg_lru.h.
struct RgLruView {
  int rows = 0;                           // B
  int columns = 0;                        // L
  int size = 0;                           // D
  const float* x = nullptr;               // [B, L, D]
  const float* input_gate = nullptr;      // [B, L, D]
  const float* recurrent_gate = nullptr;  // [B, L, D]
  const float* decay = nullptr;           // [D]
  const std::uint8_t* real = nullptr;     // [B, L]; null: all are
  const float* initial = nullptr;         // [B, D]; null: zeros
  float* state = nullptr;                 // as initial
  float* output = nullptr;                // [B, L, D]; the state before it where a column is padding
};

void rg_lru(const RgLruView& view, ThreadPool& pool);

}  // namespace reprise::kernels::cpu
