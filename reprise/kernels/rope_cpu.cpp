#include "reprise/kernels/rope_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/rope_cpu.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

// Compiled without contraction: products and sums are fused only where MLX fuses them.

// Without fused products in hardware, vectors cannot give MLX's bits.
#undef REPRISE_HAS_FUSED_PRODUCTS
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
#define REPRISE_HAS_FUSED_PRODUCTS 1
#else
#define REPRISE_HAS_FUSED_PRODUCTS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Of the first whole vectors of `count` angles scaled · frequencies[i]. Angles beyond `largest` are taken as 0.
// Returns: how many are done. The arithmetic is that of sine_and_cosine below, operation by operation.
std::size_t vector_angles(const float* frequencies, std::size_t count, float scaled, float largest, float* cosines,
                          float* sines) {
#if REPRISE_HAS_FUSED_PRODUCTS
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    auto angle = hn::Mul(hn::Set(d, scaled), hn::LoadU(d, frequencies + i));
    angle = hn::IfThenElseZero(hn::Le(hn::Abs(angle), hn::Set(d, largest)), angle);
    const auto size = hn::Abs(angle);
    const auto octant = hn::And(
        hn::Add(hn::ConvertTo(di, hn::Mul(size, hn::Set(d, 1.27323954473516f))), hn::Set(di, 1)), hn::Set(di, ~1));
    const auto turns = hn::ConvertTo(d, octant);
    auto x = hn::MulAdd(turns, hn::Set(d, -0.78515625f), size);
    x = hn::MulAdd(turns, hn::Set(d, -2.4187564849853515625e-4f), x);
    x = hn::MulAdd(turns, hn::Set(d, -3.77489497744594108e-8f), x);
    const auto z = hn::Mul(x, x);

    auto by_cosine = hn::MulAdd(z, hn::Set(d, 2.443315711809948e-5f), hn::Set(d, -1.388731625493765e-3f));
    by_cosine = hn::MulAdd(by_cosine, z, hn::Set(d, 4.166664568298827e-2f));
    by_cosine = hn::Mul(hn::Mul(by_cosine, z), z);
    by_cosine = hn::MulAdd(z, hn::Set(d, -0.5f), by_cosine);
    by_cosine = hn::Add(by_cosine, hn::Set(d, 1.0f));

    auto by_sine = hn::MulAdd(z, hn::Set(d, -1.9515295891e-4f), hn::Set(d, 8.3321608736e-3f));
    by_sine = hn::MulAdd(by_sine, z, hn::Set(d, -1.6666654611e-1f));
    by_sine = hn::Mul(by_sine, z);
    by_sine = hn::MulAdd(x, by_sine, x);

    const auto two = hn::Set(di, 2);
    const auto swapped = hn::RebindMask(d, hn::TestBit(octant, two));
    const auto s = hn::IfThenElse(swapped, by_cosine, by_sine);
    const auto c = hn::IfThenElse(swapped, by_sine, by_cosine);
    // Bit 2 of the octant becomes the sign's bit.
    const auto sign_of = [&](auto bits)
                             HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<29>(hn::And(bits, hn::Set(di, 4)))); };
    const auto below_zero = hn::IfThenElseZero(hn::Lt(angle, hn::Zero(d)), hn::Set(d, -0.0f));
    hn::StoreU(hn::Xor(s, hn::Xor(sign_of(octant), below_zero)), d, sines + i);
    hn::StoreU(hn::Xor(c, sign_of(hn::Not(hn::Sub(octant, two)))), d, cosines + i);
  }
  return i;
#else
  (void)frequencies, (void)count, (void)scaled, (void)largest, (void)cosines, (void)sines;
  return 0;
#endif
}

}  // namespace reprise::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu {

HWY_EXPORT(vector_angles);

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
  const auto half = static_cast<std::size_t>(rope.dims / 2);
  const float scaled = position * rope.scale;
  std::size_t i = HWY_DYNAMIC_DISPATCH(vector_angles)(rope.frequencies, half, scaled, kLargestAngle, cosines, sines);
  for (; i < half; ++i) {
    const float angle = scaled * rope.frequencies[i];
    sine_and_cosine(std::abs(angle) <= kLargestAngle ? angle : 0.0f, sines[i], cosines[i]);
  }
  for (i = 0; i < half; ++i) {
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
#endif  // HWY_ONCE
