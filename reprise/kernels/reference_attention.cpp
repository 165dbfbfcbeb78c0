#include <limits>
#include <string>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

struct Sizes {
  int B, H, Hkv, L, S, Dv;
};

// Lowest value that masking adds to or puts in place of a score of this dtype: finite even after a score is added, so
// that the softmax of a row of nothing else is finite.
mx::array masked_score(mx::Dtype dtype) { return mx::array(static_cast<float>(mx::finfo(dtype).min / 2), dtype); }

// A GPU's products take packed numbers in every dtype and sum in float32; the CPU's are exact and fast in float32 alone
// (bfloat16: percents off, and 7 times slower; float16: 50 times).
bool on_gpu() { return mx::default_device().type == mx::Device::gpu; }

// x [B, Hkv, rows, D] times the transposed tensor, or x [B, Hkv, rows, S] times the tensor, in x's dtype. Keys and
// values are never repeated over the heads of a group: with packed numbers that are broadcast, MLX 0.32.4's CUDA
// products are wrong.
mx::array product(const mx::array& x, const QuantizedTensor& tensor, const KVQuantization& quantization,
                  bool transpose) {
  return mx::quantized_matmul(x, tensor.packed, mx::astype(tensor.scales, x.dtype()),
                              mx::astype(tensor.biases, x.dtype()), transpose, quantization.group_size,
                              quantization.bits);
}

mx::array causal_mask(const Sizes& n) {
  const mx::array last_key = mx::reshape(mx::arange(n.S - n.L, n.S, mx::int32), {n.L, 1});
  return mx::less_equal(mx::arange(0, n.S, mx::int32), last_key);
}

// A mask over [B, H, L, S] → the same over [B, Hkv, R, L, S].
mx::array grouped(const mx::array& mask, const Sizes& n) {
  if (mask.ndim() < 3) return mask;
  mx::Shape shape = mask.shape();
  const auto head = shape.end() - 3;
  const mx::Shape groups = *head == 1 ? mx::Shape{1, 1} : mx::Shape{n.Hkv, n.H / n.Hkv};
  *head = groups[0];
  shape.insert(head + 1, groups[1]);
  return mx::reshape(mask, shape);
}

// scores [B, Hkv, R, L, S].
mx::array masked(const mx::array& scores, const Mask& mask, const Sizes& n) {
  std::optional<mx::array> array;
  if (std::holds_alternative<Causal>(mask) && n.L > 1) array = causal_mask(n);
  if (const auto* given = std::get_if<mx::array>(&mask)) array = grouped(*given, n);
  if (!array) return scores;
  const mx::array lowest = masked_score(scores.dtype());
  if (array->dtype() == mx::bool_) return mx::where(*array, scores, lowest);
  return mx::add(scores, mx::maximum(mx::astype(*array, scores.dtype()), lowest));
}

mx::array capped(const mx::array& scores, const std::optional<float>& softcap) {
  if (!softcap) return scores;
  const mx::array cap(*softcap, scores.dtype());
  return mx::multiply(cap, mx::tanh(mx::divide(scores, cap)));
}

// Attention written out, where no operation of MLX does it: in products with keys and with values, which take and give
// [B, Hkv, rows, …] in queries' dtype.
template <typename KeyProduct, typename ValueProduct>
mx::array attention_in_parts(const mx::array& queries, const Sizes& n, const AttentionParams& params,
                             const KeyProduct& by_keys, const ValueProduct& by_values) {
  // The queries of one key/value head lie together, so that a product with its keys is one matrix product.
  const int R = n.H / n.Hkv;
  const mx::Shape rows_by_keys{n.B, n.Hkv, R * n.L, n.S};
  const mx::array rows = mx::reshape(mx::multiply(queries, mx::array(params.scale, queries.dtype())),
                                     {n.B, n.Hkv, R * n.L, queries.shape(3)});
  const mx::array scores =
      masked(capped(mx::reshape(by_keys(rows), {n.B, n.Hkv, R, n.L, n.S}), params.softcap), params.mask, n);
  const mx::array weights = mx::reshape(mx::softmax(scores, -1, /*precise=*/true), rows_by_keys);
  mx::array out = mx::reshape(by_values(weights), {n.B, n.H, n.L, n.Dv});
  if (params.sinks) {
    // A sink takes exp(sink) / (exp(sink) + sum of exp(scores)) of the weight and gives no value.
    const mx::array total =
        mx::reshape(mx::logsumexp(mx::astype(scores, mx::float32), -1, /*keepdims=*/true), {n.B, n.H, n.L, 1});
    const mx::array sinks = mx::reshape(mx::astype(*params.sinks, mx::float32), {1, n.H, 1, 1});
    out = mx::multiply(out, mx::sigmoid(mx::subtract(total, sinks)));
  }
  return out;
}

mx::array quantized_attention(const mx::array& queries, const QuantizedKV& keys_values, const AttentionParams& params) {
  const auto& [keys, values, quantization] = keys_values;
  const Sizes n{queries.shape(0), queries.shape(1),     keys.packed.shape(1),
                queries.shape(2), keys.packed.shape(2), values.scales.shape(3) * quantization.group_size};
  const mx::Dtype dtype = on_gpu() ? queries.dtype() : mx::float32;
  const mx::array out = attention_in_parts(
      mx::astype(queries, dtype), n, params,
      [&](const mx::array& rows) { return product(rows, keys_values.keys, keys_values.quantization, true); },
      [&](const mx::array& weights) { return product(weights, keys_values.values, keys_values.quantization, false); });
  return mx::astype(out, queries.dtype());
}

// MLX's own operation caps no scores.
mx::array capped_attention(const mx::array& queries, const DenseKV& keys_values, const AttentionParams& params) {
  const auto& [keys, values] = keys_values;
  const Sizes n{queries.shape(0), queries.shape(1), keys.shape(1), queries.shape(2), keys.shape(2), values.shape(3)};
  const mx::Dtype dtype = on_gpu() ? queries.dtype() : mx::promote_types(queries.dtype(), mx::float32);
  const mx::array out = attention_in_parts(
      mx::astype(queries, dtype), n, params,
      [&](const mx::array& rows) { return mx::matmul(rows, mx::swapaxes(mx::astype(keys_values.keys, dtype), 2, 3)); },
      [&](const mx::array& weights) { return mx::matmul(weights, mx::astype(keys_values.values, dtype)); });
  return mx::astype(out, queries.dtype());
}

mx::array dense_attention(const mx::array& queries, const DenseKV& keys_values, const AttentionParams& params) {
  if (params.softcap) return capped_attention(queries, keys_values, params);
  std::string mode;
  std::optional<mx::array> mask;
  if (std::holds_alternative<Causal>(params.mask)) {
    mode = "causal";
  } else if (const auto* array = std::get_if<mx::array>(&params.mask)) {
    // No masked score is -inf, so that a row in which all are masked stays finite.
    mask = array->dtype() == mx::bool_
               ? *array
               : mx::maximum(mx::astype(*array, queries.dtype()), masked_score(queries.dtype()));
  }
  // Rows stored narrower than the queries are widened for the product; rows stored wider make it exact in their dtype.
  return mx::astype(mx::fast::scaled_dot_product_attention(queries, keys_values.keys, keys_values.values, params.scale,
                                                           mode, mask, params.sinks),
                    queries.dtype());
}

}  // namespace

mx::array attention(const mx::array& queries, const KeysValues& keys_values, const AttentionParams& params) {
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) return dense_attention(queries, *dense, params);
  return quantized_attention(queries, std::get<QuantizedKV>(keys_values), params);
}

}  // namespace reprise::kernels::reference
