#include "reprise/kernels/reference.h"

#include <utility>

#include "mlx/device.h"
#include "mlx/fast.h"
#include "mlx/ops.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

mx::array apply(const mx::array& x, const AffineMap& map) {
  auto y = multiply_transposed(x, map.weight);
  return map.bias ? mx::add(y, mx::astype(*map.bias, x.dtype())) : y;
}

mx::array activated(const mx::array& gate, GateActivation activation) {
  if (activation == GateActivation::silu) return mx::multiply(gate, mx::sigmoid(gate));
  const auto number = [&](float value) { return mx::array(value, gate.dtype()); };
  const auto cubic = mx::multiply(number(0.044715f), mx::multiply(gate, mx::multiply(gate, gate)));
  const auto inner = mx::tanh(mx::multiply(number(0.7978845608f), mx::add(gate, cubic)));
  return mx::multiply(mx::multiply(number(0.5f), gate), mx::add(number(1.0f), inner));
}

// MLX unpacks groups of 32 and more: the numbers themselves, to which the groups' scales and biases come afterwards.
mx::array unpacked_in_groups_of_16(const QuantizedWeight& w, mx::Dtype dtype) {
  const int rows = w.packed.shape(0);
  const int groups = w.scales.shape(-1);
  const mx::Shape halves{rows, groups / 2};
  const auto numbers = mx::dequantize(w.packed, mx::ones(halves, dtype), mx::zeros(halves, dtype), 32, w.bits);
  const auto widened = [&](const mx::array& x) { return mx::expand_dims(mx::astype(x, dtype), -1); };
  const auto grouped = mx::reshape(numbers, {rows, groups, 16});
  return mx::reshape(mx::add(mx::multiply(grouped, widened(w.scales)), widened(w.biases)), {rows, groups * 16});
}

}  // namespace

mx::array unpacked(const Weight& weight, mx::Dtype dtype) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return mx::astype(*dense, dtype);
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    return mx::dequantize(m->packed, m->scales, {}, group_size_of(m->format), bits_of(m->format), name_of(m->format),
                          {}, dtype);
  }
  // Scales are widened before the product: rounding happens once, to dtype.
  const auto& w = std::get<QuantizedWeight>(weight);
  if (w.group_size == 16) return unpacked_in_groups_of_16(w, dtype);
  return mx::dequantize(w.packed, mx::astype(w.scales, dtype), mx::astype(w.biases, dtype), w.group_size, w.bits);
}

mx::array multiply_transposed(const mx::array& x, const Weight& weight) {
  if (std::holds_alternative<DenseWeight>(weight)) return mx::matmul(x, mx::transpose(unpacked(weight, x.dtype())));
  // MLX's CPU product is scalar code whose cost grows with the rows; unpacking the weight once and multiplying it by
  // BLAS costs as much as this many rows.
  constexpr std::size_t kRowsWorthUnpacking = 8;
  if (x.size() >= kRowsWorthUnpacking * static_cast<std::size_t>(x.shape(-1)) && x.dtype() == mx::float32 &&
      mx::default_device() == mx::Device::cpu) {
    return mx::matmul(x, mx::transpose(unpacked(weight, x.dtype())));
  }
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    return mx::quantized_matmul(x, m->packed, m->scales, {}, /*transpose=*/true, group_size_of(m->format),
                                bits_of(m->format), name_of(m->format));
  }
  const auto& w = std::get<QuantizedWeight>(weight);
  if (w.group_size == 16) return mx::matmul(x, mx::transpose(unpacked(weight, x.dtype())));
  return mx::quantized_matmul(x, w.packed, mx::astype(w.scales, x.dtype()), mx::astype(w.biases, x.dtype()),
                              /*transpose=*/true, w.group_size, w.bits);
}

std::vector<mx::array> linear(const mx::array& x, const std::vector<AffineMapPtr>& maps,
                              const std::optional<RmsNormParams>& norm) {
  const mx::array input = norm ? reference::rms_norm(x, *norm) : x;
  std::vector<mx::array> out;
  for (const AffineMapPtr& map : maps) out.push_back(apply(input, *map));
  return out;
}

namespace {

// residual + norm(x) in x's dtype. What float16 cannot hold of a normed sum becomes its largest number: Gemma's
// residuals grow beyond it.
mx::array with_residual(const mx::array& x, const std::optional<mx::array>& residual,
                        const std::optional<RmsNormParams>& norm) {
  const mx::array out = norm ? reference::rms_norm(x, *norm) : x;
  if (!residual) return out;
  if (!norm || x.dtype() != mx::float16) return mx::add(mx::astype(*residual, x.dtype()), out);
  const mx::array largest(65504.0f);
  const mx::array sum = mx::add(mx::astype(*residual, mx::float32), mx::astype(out, mx::float32));
  return mx::astype(mx::clip(sum, mx::negative(largest), largest), x.dtype());
}

}  // namespace

mx::array linear_add(const mx::array& x, const AffineMapPtr& map, const mx::array& residual,
                     const std::optional<RmsNormParams>& output_norm) {
  return with_residual(apply(x, *map), residual, output_norm);
}

mx::array gated_mlp(const mx::array& x, const AffineMapPtr& gate, const AffineMapPtr& up, const AffineMapPtr& down,
                    GateActivation activation, const std::optional<RmsNormParams>& norm,
                    const std::optional<mx::array>& residual, const std::optional<RmsNormParams>& output_norm) {
  const mx::array input = norm ? reference::rms_norm(x, *norm) : x;
  const mx::array hidden = mx::multiply(activated(apply(input, *gate), activation), apply(input, *up));
  return with_residual(apply(hidden, *down), residual, output_norm);
}

mx::array rms_norm(const mx::array& x, const RmsNormParams& norm) {
  return mx::astype(mx::fast::rms_norm(x, norm.weight, norm.eps), x.dtype());
}

mx::array embedding(const mx::array& ids, const Weight& weight, mx::Dtype dtype) {
  return unpacked(with_each_array(weight, [&](const mx::array& rows) { return mx::take(rows, ids, 0); }), dtype);
}

}  // namespace reprise::kernels::reference
