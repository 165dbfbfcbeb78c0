// The gated delta rule by pointers and sizes, no MLX. Private to `kernels`. Every row of a state goes its own way, so
// that results depend neither on the threads nor on how columns are cut into chunks.
// Threads: free functions.
#pragma once

#include <cstdint>

#include "reprise/base/thread_pool.h"

namespace reprise::kernels::cpu {

// Each array lies end to end. Names as in delta_rule.h.
struct DeltaRuleView {
  int rows = 0;     // B
  int columns = 0;  // L
  int key_heads = 0;
  int value_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  const float* qkv = nullptr;          // [B, L, 2 Hk Dk + Hv Dv]
  const float* a = nullptr;            // [B, L, Hv]
  const float* b = nullptr;            // [B, L, Hv]
  const float* decay = nullptr;        // [Hv]
  const float* dt_bias = nullptr;      // [Hv]
  const std::uint8_t* real = nullptr;  // [B, L]; null: all are
  const float* initial = nullptr;      // [B, Hv, Dv, Dk]; null: zeros
  float* state = nullptr;              // as initial; may be the same memory
  float* output = nullptr;             // [B, L, Hv, Dv]
};

void gated_delta_rule(const DeltaRuleView& view, ThreadPool& pool);

}  // namespace reprise::kernels::cpu
