#include "reprise/kernels/rope_cpu.h"

#include <cmath>
#include <cstdint>

// Compiled without contraction: products and sums are fused only where MLX fuses them.
namespace reprise::kernels::cpu {

namespace {

// Beyond it the reduction below is not exact.
constexpr float kLargestAngle = 8388608.0f;

// Sine and cosine as in Cephes' single precision library: the angle is reduced to [-π/4, π/4] in three steps, and one
// of two polynomials gives each. Order and rounding of every operation, the fused ones too, are those of MLX.
inline void sine_and_cosine(float angle, float& sine, float& cosine) {
  const float size = std::abs(angle);
  const auto octant = (static_cast<std::int32_t>(size * 1.27323954473516f) + 1) & ~1;
  const auto turns = static_cast<float>(octant);
  float x = std::fma(turns, -0.78515625f, size);
  x = std::fma(turns, -2.4187564849853515625e-4f, x);
  x = std::fma(turns, -3.77489497744594108e-8f, x);
  const float z = x * x;

  float by_cosine = std::fma(z, 2.443315711809948e-5f, -1.388731625493765e-3f);
  by_cosine = std::fma(by_cosine, z, 4.166664568298827e-2f);
  by_cosine = by_cosine * z;
  by_cosine = by_cosine * z;
  by_cosine = std::fma(z, -0.5f, by_cosine);
  by_cosine = by_cosine + 1.0f;

  float by_sine = std::fma(z, -1.9515295891e-4f, 8.3321608736e-3f);
  by_sine = std::fma(by_sine, z, -1.6666654611e-1f);
  by_sine = by_sine * z;
  by_sine = std::fma(x, by_sine, x);

  const bool swapped = (octant & 2) != 0;
  const float s = swapped ? by_cosine : by_sine;
  const float c = swapped ? by_sine : by_cosine;
  const bool negative_sine = (angle < 0.0f) != ((octant & 4) != 0);
  const bool positive_cosine = ((octant - 2) & 4) != 0;
  sine = negative_sine ? -s : s;
  cosine = positive_cosine ? c : -c;
}

}  // namespace

void rope_angles(const RopeView& rope, float position, float* cosines, float* sines) {
  const int half = rope.dims / 2;
  const float scaled = position * rope.scale;
  float largest = 0.0f;
  for (int i = 0; i < half; ++i) {
    const float angle = scaled * rope.frequencies[i];
    const float size = std::abs(angle);
    largest = size > largest ? size : largest;
    sine_and_cosine(size > kLargestAngle ? 0.0f : angle, sines[i], cosines[i]);
  }
  if (largest <= kLargestAngle) return;
  for (int i = 0; i < half; ++i) {
    const float angle = scaled * rope.frequencies[i];
    if (std::abs(angle) <= kLargestAngle) continue;
    sines[i] = std::sin(angle);
    cosines[i] = std::cos(angle);
  }
}

void rotate_heads(const RopeView& rope, const float* cosines, const float* sines, int heads, int head_size, float* x) {
  const int half = rope.dims / 2;
  for (int h = 0; h < heads; ++h, x += head_size) {
    if (rope.input_scale != 1.0f) {
      for (int i = 0; i < rope.dims; ++i) x[i] *= rope.input_scale;
    }
    if (rope.traditional) {
      for (int i = 0; i < half; ++i) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
      }
    } else {
      for (int i = 0; i < half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = a * sines[i] + b * cosines[i];
      }
    }
  }
}

}  // namespace reprise::kernels::cpu
