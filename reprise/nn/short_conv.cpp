#include "reprise/nn/short_conv.h"

#include <algorithm>
#include <variant>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

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

ShortConvResult short_conv(const mx::array& x, const std::optional<mx::array>& state, const mx::array& weight,
                           const std::optional<mx::array>& bias, const RealColumns& real) {
  const bool is_conv = x.ndim() == 3 && weight.ndim() == 2 && weight.shape(0) == x.shape(2) && weight.shape(1) >= 1;
  const int keep = is_conv ? weight.shape(1) - 1 : 0;
  const bool fits = is_conv && (!state || state->shape() == mx::Shape{x.shape(0), keep, x.shape(2)}) &&
                    (!real.lengths || real.lengths->size() == static_cast<std::size_t>(x.shape(0)));
  if (!fits) {
    throw Error(ErrorCode::invalid_argument,
                "[short_conv] x [B, L, C], state [B, K - 1, C], weight [C, K] and lengths [B] must agree");
  }
  const int B = x.shape(0);
  const int L = x.shape(1);
  const int C = x.shape(2);
  mx::array inputs = x;
  if (const auto* mask = std::get_if<mx::array>(&real.mask)) {
    inputs = mx::where(mx::expand_dims(*mask, -1), inputs, mx::array(0.0f, inputs.dtype()));
  }
  const mx::array before = state ? mx::astype(*state, x.dtype()) : mx::zeros({B, keep, C}, x.dtype());
  const mx::array padded = mx::concatenate({before, inputs}, 1);
  mx::array output = mx::zeros({B, L, C}, x.dtype());
  for (int k = 0; k <= keep; ++k) {
    const mx::array column = mx::slice(weight, {0, k}, {C, k + 1});
    const mx::array shifted = mx::slice(padded, {0, k, 0}, {B, k + L, C});
    const mx::array term = mx::multiply(shifted, mx::astype(mx::reshape(column, {C}), x.dtype()));
    output = k == 0 ? term : mx::add(output, term);
  }
  if (bias) output = mx::add(output, mx::astype(*bias, x.dtype()));
  return {output, last_inputs(padded, keep, real.lengths)};
}

ShortConvResult ShortConv::operator()(const mx::array& x, const std::optional<mx::array>& state,
                                      const RealColumns& real) const {
  ShortConvResult result = short_conv(x, state, weight, bias, real);
  if (activation == ConvActivation::silu) result.output = mx::multiply(result.output, mx::sigmoid(result.output));
  return result;
}

}  // namespace reprise
