#include <algorithm>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

// padded [B, K - 1 + L, C]: the K - 1 inputs before each row's end.
mx::array last_inputs(const mx::array& padded, int keep, const std::optional<std::vector<int>>& lengths) {
  const int B = padded.shape(0);
  const int L = padded.shape(1) - keep;
  const int C = padded.shape(2);
  if (!lengths) return mx::slice(padded, {0, L, 0}, padded.shape());
  std::vector<int> columns;
  for (const int length : *lengths) {
    for (int k = 0; k < keep; ++k) columns.push_back(std::clamp(length, 0, L) + k);
  }
  const mx::array index(columns.data(), {B, keep, 1}, mx::int32);
  return mx::take_along_axis(padded, mx::broadcast_to(index, {B, keep, C}), 1);
}

}  // namespace

ShortConvResult short_conv(const ShortConvInputs& inputs, const ShortConvParams& params) {
  const int B = inputs.x.shape(0);
  const int L = inputs.x.shape(1);
  const int C = inputs.x.shape(2);
  const int keep = params.weight.shape(1) - 1;
  const mx::Dtype dtype = inputs.x.dtype();
  mx::array x = inputs.x;
  if (inputs.mask) x = mx::where(mx::expand_dims(*inputs.mask, -1), x, mx::array(0.0f, dtype));
  const mx::array before = inputs.state ? mx::astype(*inputs.state, dtype) : mx::zeros({B, keep, C}, dtype);
  const mx::array padded = mx::concatenate({before, x}, 1);
  mx::array output = mx::zeros({B, L, C}, dtype);
  for (int k = 0; k <= keep; ++k) {
    const mx::array column = mx::slice(params.weight, {0, k}, {C, k + 1});
    const mx::array shifted = mx::slice(padded, {0, k, 0}, {B, k + L, C});
    const mx::array term = mx::multiply(shifted, mx::astype(mx::reshape(column, {C}), dtype));
    output = k == 0 ? term : mx::add(output, term);
  }
  if (params.bias) output = mx::add(output, mx::astype(*params.bias, dtype));
  if (params.activation == ConvActivation::silu) output = mx::multiply(output, mx::sigmoid(output));
  return {output, last_inputs(padded, keep, inputs.lengths)};
}

}  // namespace reprise::kernels::reference
