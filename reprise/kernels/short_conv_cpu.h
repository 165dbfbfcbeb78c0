// The short depthwise convolution, by pointers and sizes, no MLX. Private to `kernels`. One task is some channels of
// one row of a batch over all its columns. Threads: free functions; tasks of one call may run at once.
#pragma once

#include <cstdint>

#include "reprise/kernels/columns_view.h"

namespace reprise::kernels::cpu {

struct ShortConvView {
  int rows = 0;      // B
  int columns = 0;   // L
  int channels = 0;  // C
  int width = 0;     // K

  ColumnsView x = {};                  // [B, L, C]
  const float* initial = nullptr;      // [B, K - 1, C]; null: zeros
  const std::uint8_t* mask = nullptr;  // [B, L], 0: read as zeros; null: none
  const int* lengths = nullptr;        // [B]: columns before the new state; null: all
  const float* weight = nullptr;       // [C, K]
  const float* bias = nullptr;         // [C] or null
  bool silu = false;
  float* output = nullptr;  // [B, L, C]
  float* state = nullptr;   // [B, K - 1, C]; other memory than initial
};

// Tasks are 0 … count - 1, in any order. Throw: bad_alloc.
int num_short_conv_tasks(const ShortConvView& conv);
void run_short_conv_task(const ShortConvView& conv, int task);

}  // namespace reprise::kernels::cpu
