#include "reprise/kernels/unpack.h"

#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu {

void unpack_row(const WeightView& weight, int row, float* out) {
  const auto cols = static_cast<std::size_t>(weight.cols);
  const auto index = static_cast<std::size_t>(row);
  if (weight.bits == 0) {
    for (std::size_t k = 0; k < cols; ++k) out[k] = element_at(weight.element, weight.data, index * cols + k);
    return;
  }
  const auto group_size = static_cast<std::size_t>(weight.group_size);
  const std::size_t groups = cols / group_size;
  const auto* packed =
      static_cast<const std::uint8_t*>(weight.data) + index * cols / 8 * static_cast<std::size_t>(weight.bits);
  for (std::size_t g = 0; g < groups; ++g) {
    const float scale = element_at(weight.element, weight.scales, index * groups + g);
    if (is_e2m1(weight)) {
      for (std::size_t k = g * group_size; k < (g + 1) * group_size; ++k)
        out[k] = 0.5F * scale * (static_cast<float>(kE2m1Raised[packed_at(packed, weight.bits, k)]) - kE2m1Zero);
      continue;
    }
    const float bias = element_at(weight.element, weight.biases, index * groups + g);
    for (std::size_t k = g * group_size; k < (g + 1) * group_size; ++k)
      out[k] = scale * static_cast<float>(packed_at(packed, weight.bits, k)) + bias;
  }
}

}  // namespace reprise::kernels::cpu
