// Scans of state space models, by pointers and sizes, no MLX. Private to `kernels`. One task is some channels of one
// row of a batch over all its columns, so results depend neither on the threads nor on how columns are cut into chunks.
// Threads: free functions; tasks of one call may run at once.
#pragma once

#include <cstdint>

#include "reprise/kernels/columns_view.h"

namespace reprise::kernels::cpu {

struct ScanView {
  int rows = 0;     // B
  int columns = 0;  // L
  int heads = 0;    // channels of a selective scan
  int head_size = 1;
  int groups = 1;  // of heads
  int states = 0;  // N

  ColumnsView x = {};      // [B, L, heads * head_size]
  ColumnsView delta = {};  // [B, L, heads]
  ColumnsView b = {};      // [B, L, groups * N]
  ColumnsView c = {};
  ColumnsView gate = {};               // as x
  const std::uint8_t* mask = nullptr;  // [B, L], 0: padding; null: none
  const float* initial = nullptr;      // [B, heads, head_size, N]; null: zeros
  const float* a = nullptr;            // [heads], of a selective scan [heads, N]
  const float* d = nullptr;            // [heads]
  const float* bias = nullptr;         // [heads] or null
  float low = 0.0f;                    // bounds of the steps
  float high = 0.0f;
  float* y = nullptr;      // [B, L, heads * head_size]; 0 in padded columns
  float* state = nullptr;  // as initial; may be the same memory
};

// Tasks are 0 … count - 1, in any order. Throw: bad_alloc.
int num_selective_scan_tasks(const ScanView& scan);
void run_selective_scan_task(const ScanView& scan, int task);
int num_head_scan_tasks(const ScanView& scan);
void run_head_scan_task(const ScanView& scan, int task);

}  // namespace reprise::kernels::cpu
