// What surrounds products in a transformer block, over rows of float32. Pointers and sizes, no MLX. Private to
// `kernels`. Rows may lie in larger matrices: strides are in floats.
// Threads: free functions.
#pragma once

#include <cstddef>

namespace reprise::kernels::cpu {

// out = x / sqrt(mean(x²) + eps) · weight, each of [rows, size] by itself. out may be x.
void rms_norm(const float* x, std::size_t ldx, int rows, int size, const float* weight, float eps, float* out,
              std::size_t ldo);

// out += bias + residual over [rows, size]; bias [size] and residual [rows, size] may be null.
void add(const float* bias, const float* residual, std::size_t ldr, int rows, int size, float* out, std::size_t ldo);

// gate = act(gate) · up over n numbers. silu(x) = x · sigmoid(x); gelu_tanh(x) = x · sigmoid(√(8/π) (x + 0.044715 x³)).
void silu_times(float* gate, const float* up, std::size_t n);
void gelu_tanh_times(float* gate, const float* up, std::size_t n);
// gate = (min(max(up, -limit), limit) + 1) · g · sigmoid(alpha · g), g = min(gate, limit).
void clipped_swiglu(float* gate, const float* up, std::size_t n, float alpha, float limit);
// out += factor · x.
void add_times(float factor, const float* x, std::size_t n, float* out);

}  // namespace reprise::kernels::cpu
