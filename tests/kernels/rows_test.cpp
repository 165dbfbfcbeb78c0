// Rows between float32 and what caches store, against MLX's casts and its quantisation.
#include "reprise/kernels/rows_cpu.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "tests/kernels/each_target.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;
using cpu::Element;

mx::Dtype dtype_of(Element element) {
  return element == Element::f32 ? mx::float32 : element == Element::f16 ? mx::float16 : mx::bfloat16;
}

// Every exponent, ties, subnormal numbers, both signs.
std::vector<float> floats() {
  std::vector<float> out = {0.0f, -0.0f, 65504.0f, -65504.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1.8p-24f, 1e-45f};
  std::uint32_t state = 1;
  for (int i = 0; i < 200000; ++i) {
    state = state * 1664525u + 1013904223u;
    std::uint32_t bits = state;
    if (i % 3 == 0) bits &= ~0x1fffu;                    // exact in float16
    if (i % 3 == 1) bits = (bits & ~0x1fffu) | 0x1000u;  // a tie
    const float x = std::bit_cast<float>(bits);
    if (std::isfinite(x) && std::abs(x) < 65504.0f) out.push_back(x);
    out.push_back(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-28f);
  }
  return out;
}

void expect_rounding_of_mlx() {
  const std::vector<float> x = floats();
  const int size = static_cast<int>(x.size());
  for (const Element element : {Element::f16, Element::bf16}) {
    std::vector<std::uint16_t> got(x.size());
    cpu::store_row(x.data(), element, size, got.data());
    mx::array expected = mx::view(mx::astype(mx::array(x.begin(), {size}, mx::float32), dtype_of(element)), mx::uint16);
    expected.eval();
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], expected.data<std::uint16_t>()[i]) << x[i];

    std::vector<float> back(x.size());
    cpu::load_row(got.data(), element, 1, size, back.data());
    mx::array wide = mx::astype(mx::view(expected, dtype_of(element)), mx::float32);
    wide.eval();
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(back[i], wide.data<float>()[i]) << x[i];

    std::vector<float> rounded = x;
    cpu::round_row(element, size, rounded.data());
    EXPECT_EQ(rounded, back);
  }
}

TEST(StoredRows, AreRoundedAsMlxRounds) { on_each_target(expect_rounding_of_mlx); }

void expect_saturation() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {65519.0f, 65520.0f, 1e30f, kInfinity, -70000.0f, -kInfinity, std::nanf("")};
  std::vector<std::uint16_t> stored(x.size());
  cpu::store_row(x.data(), Element::f16, static_cast<int>(x.size()), stored.data());
  std::vector<float> back(x.size());
  cpu::load_row(stored.data(), Element::f16, 1, static_cast<int>(x.size()), back.data());
  for (std::size_t i = 0; i + 1 < x.size(); ++i) EXPECT_EQ(back[i], x[i] > 0 ? 65504.0f : -65504.0f);
  EXPECT_TRUE(std::isnan(back.back()));
  // bfloat16 has float32's range.
  cpu::store_row(x.data(), Element::bf16, static_cast<int>(x.size()), stored.data());
  cpu::load_row(stored.data(), Element::bf16, 1, static_cast<int>(x.size()), back.data());
  EXPECT_NEAR(back[2], 1e30f, 1e28f);
  EXPECT_EQ(back[3], kInfinity);
  EXPECT_TRUE(std::isnan(back.back()));
}

TEST(StoredRows, WhatFloat16CannotHoldBecomesItsLargestNumber) { on_each_target(expect_saturation); }

TEST(StoredRows, StridedRowsAreRead) {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};
  std::vector<float> out(3);
  cpu::load_row(x.data(), Element::f32, 2, 3, out.data());
  EXPECT_EQ(out, (std::vector<float>{1, 3, 5}));
}

void expect_quantisation_of_mlx() {
  constexpr int kSize = 256, kRows = 40;
  mx::array random = mx::random::normal({kRows, kSize}, mx::float32, 0.3f, 2.0f, mx::random::key(5));
  std::vector<mx::array> samples = {random,
                                    mx::multiply(random, mx::array(1e-4f)),
                                    mx::abs(random),
                                    mx::zeros({kRows, kSize}),
                                    mx::full({kRows, kSize}, 5.0f),
                                    mx::add(mx::array(5.0f), mx::multiply(random, mx::array(1e-6f)))};
  for (const mx::array& sample : samples) {
    for (const Element element : {Element::f32, Element::f16, Element::bf16}) {
      const mx::array x = mx::astype(sample, dtype_of(element));
      mx::array wide = mx::contiguous(mx::astype(x, mx::float32));
      wide.eval();
      for (const int group_size : {32, 64, 128}) {
        for (const int bits : {2, 3, 4, 5, 6, 8}) {
          SCOPED_TRACE(std::to_string(group_size) + " " + std::to_string(bits) + " " +
                       std::to_string(static_cast<int>(element)));
          const std::size_t packed_bytes = kSize * static_cast<std::size_t>(bits) / 8;
          const std::size_t group_bytes = kSize / static_cast<std::size_t>(group_size) * cpu::size_of(element);
          std::vector<std::uint8_t> packed(kRows * packed_bytes), scales(kRows * group_bytes), biases = scales;
          for (std::size_t row = 0; row < kRows; ++row) {
            cpu::quantize_row({group_size, bits, element}, wide.data<float>() + row * kSize, kSize,
                              packed.data() + row * packed_bytes, scales.data() + row * group_bytes,
                              biases.data() + row * group_bytes);
          }
          std::vector<mx::array> expected = mx::quantize(x, group_size, bits);
          mx::eval(expected);
          const auto bytes = [](const mx::array& a) {
            return std::vector<std::uint8_t>(a.data<std::uint8_t>(), a.data<std::uint8_t>() + a.nbytes());
          };
          EXPECT_EQ(packed, bytes(expected[0]));
          EXPECT_EQ(scales, bytes(expected[1]));
          EXPECT_EQ(biases, bytes(expected[2]));
        }
      }
    }
  }
}

TEST(QuantizedRows, AreBitForBitThoseOfMlx) { on_each_target(expect_quantisation_of_mlx); }

}  // namespace
}  // namespace reprise::kernels
