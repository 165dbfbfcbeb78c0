#include "reprise/nn/attention.h"

#include <stdexcept>
#include <string>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/nn/quantized_attention.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

std::string text(const mx::Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

void check_shapes(const mx::array& q, const mx::array& k, const mx::array& v) {
  const bool fits = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && k.shape(0) == q.shape(0) &&
                    v.shape(0) == q.shape(0) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0 &&
                    v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2) && k.shape(3) == q.shape(3);
  if (fits) return;
  throw Error(
      ErrorCode::invalid_argument,
      "[scaled_dot_product_attention] queries [B, H, L, D], keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] must "
      "agree, but got " +
          text(q.shape()) + ", " + text(k.shape()) + ", " + text(v.shape()));
}

}  // namespace

mx::array scaled_dot_product_attention(const mx::array& queries, const KeysValues& keys_values,
                                       const AttentionScoreOptions& options) {
  if (const auto* quantized = std::get_if<QuantizedKV>(&keys_values)) {
    return internal::quantized_attention(queries, *quantized, options);
  }
  const auto* dense = std::get_if<DenseKV>(&keys_values);
  check_shapes(queries, dense->keys, dense->values);
  if (queries.size() == 0 || dense->keys.shape(2) == 0) {
    return mx::zeros({queries.shape(0), queries.shape(1), queries.shape(2), dense->values.shape(3)}, queries.dtype());
  }
  std::string mode;
  std::optional<mx::array> mask;
  if (std::holds_alternative<Causal>(options.mask)) {
    mode = "causal";
  } else if (const auto* array = std::get_if<mx::array>(&options.mask)) {
    // No masked score is -inf, so that a row in which all are masked stays finite.
    mask = array->dtype() == mx::bool_
               ? *array
               : mx::maximum(mx::astype(*array, queries.dtype()), internal::masked_score(queries.dtype()));
  }
  // What is left to go wrong is the mask's or the sinks' shape, which MLX checks.
  const auto attend = [&] {
    return mx::fast::scaled_dot_product_attention(queries, dense->keys, dense->values, options.scale, mode, mask,
                                                  options.sinks);
  };
  // Rows stored narrower than the queries are widened for the product; rows stored wider make it exact in their dtype.
  try {
    return mx::astype(attend(), queries.dtype());
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::invalid_argument, std::string("[scaled_dot_product_attention] ") + error.what());
  }
}

}  // namespace reprise
