#include "reprise/nn/linear.h"

#include <utility>

#include "mlx/device.h"
#include "mlx/ops.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

// MLX's CPU quantised product is scalar code whose cost grows with the rows; unpacking the weight once and multiplying
// it by BLAS costs as much as this many rows.
constexpr std::size_t kRowsWorthUnpacking = 8;

bool worth_unpacking(const mx::array& x) {
  return x.size() >= kRowsWorthUnpacking * static_cast<std::size_t>(x.shape(-1)) && x.dtype() == mx::float32 &&
         mx::default_device() == mx::Device::cpu;
}

}  // namespace

mx::array multiply_transposed(const mx::array& x, const Weight& weight) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) {
    return mx::matmul(x, mx::transpose(mx::astype(*dense, x.dtype())));
  }
  const auto& w = std::get<QuantizedWeight>(weight);
  const auto scales = mx::astype(w.scales, x.dtype());
  const auto biases = mx::astype(w.biases, x.dtype());
  if (worth_unpacking(x)) {
    return mx::matmul(x, mx::transpose(mx::dequantize(w.packed, scales, biases, w.group_size, w.bits)));
  }
  return mx::quantized_matmul(x, w.packed, scales, biases, /*transpose=*/true, w.group_size, w.bits);
}

Linear::Linear(Weight weight, std::optional<mx::array> bias) : weight_(std::move(weight)), bias_(std::move(bias)) {}

mx::array Linear::operator()(const mx::array& x) const {
  auto y = multiply_transposed(x, weight_);
  return bias_ ? mx::add(y, *bias_) : y;
}

Embedding::Embedding(Weight weight, mx::Dtype dtype) : weight_(std::move(weight)), dtype_(dtype) {}

mx::array Embedding::operator()(const mx::array& ids) const {
  if (const auto* dense = std::get_if<DenseWeight>(&weight_)) return mx::astype(mx::take(*dense, ids, 0), dtype_);
  const auto& w = std::get<QuantizedWeight>(weight_);
  // Scales are widened before the product: rounding happens once, to dtype_.
  return mx::dequantize(mx::take(w.packed, ids, 0), mx::astype(mx::take(w.scales, ids, 0), dtype_),
                        mx::astype(mx::take(w.biases, ids, 0), dtype_), w.group_size, w.bits);
}

mx::array Embedding::as_linear(const mx::array& x) const { return multiply_transposed(x, weight_); }

}  // namespace reprise
