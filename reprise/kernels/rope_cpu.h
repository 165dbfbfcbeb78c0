// Rotary positions by pointers and sizes, no MLX. float32; on x86 bit for bit what mx::fast::rope gives on the CPU, so
// that rows stored by either are the same. Private to `kernels`.
// Threads: free functions.
#pragma once

namespace reprise::kernels::cpu {

struct RopeView {
  int dims = 0;  // features rotated; those after it pass through
  bool traditional = false;
  float scale = 1.0f;
  float input_scale = 1.0f;
  const float* frequencies = nullptr;  // dims / 2
};

// Of the pairs' angles at `position`: dims / 2 each.
void rope_angles(const RopeView& rope, float position, float* cosines, float* sines);

// Heads [heads, head_size] of one token, in place.
void rotate_heads(const RopeView& rope, const float* cosines, const float* sines, int heads, int head_size, float* x);

}  // namespace reprise::kernels::cpu
