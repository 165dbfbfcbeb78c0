// Random weight matrices in MLX's layout, and what they mean in float64. Their arrays lie at odd addresses and end
// where the allocation ends, so that a sanitizer sees reads past them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "reprise/kernels/cpu.h"

namespace reprise::kernels::cpu {

class WeightForTests {
 public:
  // bits 0: dense, and group_size is not looked at. e8m0: MXFP4, of 4 bits in groups of 32.
  WeightForTests(int rows, int cols, int bits, int group_size, Element element, unsigned seed)
      : rows_(rows), cols_(cols), bits_(bits), group_size_(bits == 0 ? 0 : group_size), element_(element) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
    values_.resize(count);
    if (bits == 0) {
      for (double& value : values_) value = append(data_, normal(random));
      return;
    }
    const auto group = static_cast<std::size_t>(group_size);
    const auto width = static_cast<std::size_t>(bits);
    data_.resize(1 + count * width / 8);
    const float levels = static_cast<float>((1U << width) - 1);
    if (element == Element::e8m0) {
      fill_e2m1(random, group);
      return;
    }
    for (std::size_t i = 0; i < count; i += group) {
      // As quantised weights are: the middle of the levels is near zero.
      const double scale = append(scales_, (0.5F + std::abs(normal(random))) / levels);
      const double bias = append(biases_, static_cast<float>(-scale) * levels * (0.5F + 0.1F * normal(random)));
      for (std::size_t k = i; k < i + group; ++k) {
        const auto q = static_cast<std::uint32_t>(random()) & ((1U << width) - 1);
        for (std::size_t b = 0; b < width; ++b) {
          const std::size_t bit = k * width + b;
          if ((q >> b) & 1U) data_[1 + bit / 8] = static_cast<std::uint8_t>(data_[1 + bit / 8] | (1U << bit % 8));
        }
        values_[k] = scale * q + bias;
      }
    }
  }

  WeightView view() const {
    return {rows_,
            cols_,
            bits_,
            group_size_,
            element_,
            data_.data() + 1,
            scales_.data() + 1,
            element_ == Element::e8m0 ? nullptr : biases_.data() + 1};
  }

  double at(std::size_t row, std::size_t col) const { return values_[row * static_cast<std::size_t>(cols_) + col]; }

 private:
  // MXFP4: four bits each, of which the highest is the sign.
  void fill_e2m1(std::mt19937& random, std::size_t group) {
    constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (std::size_t i = 0; i < values_.size(); i += group) {
      scales_.push_back(static_cast<std::uint8_t>(124 + random() % 4));
      for (std::size_t k = i; k < i + group; ++k) {
        const auto code = static_cast<std::uint32_t>(random()) % 16;
        data_[1 + k / 2] = static_cast<std::uint8_t>(data_[1 + k / 2] | code << k % 2 * 4);
        values_[k] = std::ldexp(code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8], scales_.back() - 127);
      }
    }
  }

  // Appends `value` in the element's form. Returns: what it has become.
  double append(std::vector<std::uint8_t>& bytes, float value) const {
    std::uint32_t word = std::bit_cast<std::uint32_t>(value);
    std::size_t size = 4;
    if (element_ == Element::bf16) {
      word >>= 16;
      size = 2;
      value = std::bit_cast<float>(word << 16);
    } else if (element_ == Element::f16) {
      // Towards zero; values are small. Those below f16's normal range lose bits by the same multiplication.
      const std::uint32_t scaled = std::bit_cast<std::uint32_t>(std::abs(value) * 0x1p-112F);
      word = ((word >> 16) & 0x8000U) | (scaled >> 13);
      size = 2;
      const float magnitude = std::bit_cast<float>((word & 0x7fffU) << 13) * 0x1p112F;
      value = std::signbit(value) ? -magnitude : magnitude;
    }
    const std::size_t at = bytes.size();
    bytes.resize(at + size);
    std::memcpy(bytes.data() + at, &word, size);
    return value;
  }

  int rows_;
  int cols_;
  int bits_;
  int group_size_;
  Element element_;
  std::vector<std::uint8_t> data_ = {0};  // one byte, then the array
  std::vector<std::uint8_t> scales_ = {0};
  std::vector<std::uint8_t> biases_ = {0};
  std::vector<double> values_;
};

}  // namespace reprise::kernels::cpu
