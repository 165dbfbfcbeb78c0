#include "reprise/nn/mla.h"

#include <cstdint>
#include <sstream>
#include <utility>
#include <variant>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/nn/attention.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(const std::string& function, const std::string& what, const mx::Shape& got) {
  std::ostringstream text;
  text << got;
  throw Error(ErrorCode::invalid_argument, "[" + function + "] " + what + ", but got " + text.str());
}

const mx::array& matrices_of(const Weight& weight) {
  if (const auto* q = std::get_if<QuantizedWeight>(&weight)) return q->packed;
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) return m->packed;
  return std::get<DenseWeight>(weight);
}

mx::array joined(const mx::array& a, const mx::array& b) { return mx::concatenate({a, b}, -1); }

// Latents and positions as the keys of one head, and the latents as its values.
KeysValues as_one_head(const KeysValues& stored) {
  if (const auto* dense = std::get_if<DenseKV>(&stored))
    return DenseKV{joined(dense->keys, dense->values), dense->keys};
  const auto& [keys, values, quantization] = std::get<QuantizedKV>(stored);
  return QuantizedKV{
      {joined(keys.packed, values.packed), joined(keys.scales, values.scales), joined(keys.biases, values.biases)},
      keys,
      quantization};
}

DenseKV as_dense(const KeysValues& stored, mx::Dtype dtype) {
  if (const auto* dense = std::get_if<DenseKV>(&stored)) {
    return {mx::astype(dense->keys, dtype), mx::astype(dense->values, dtype)};
  }
  const auto& quantized = std::get<QuantizedKV>(stored);
  const auto unpacked = [&](const QuantizedTensor& tensor) {
    return mx::astype(mx::dequantize(tensor.packed, tensor.scales, tensor.biases, quantized.quantization.group_size,
                                     quantized.quantization.bits),
                      dtype);
  };
  return {unpacked(quantized.keys), unpacked(quantized.values)};
}

}  // namespace

MultiLinear::MultiLinear(Weight stacked) : weight_(std::move(stacked)), heads_(0), out_(0), in_(0) {
  const mx::array& matrices = matrices_of(weight_);
  if (matrices.ndim() != 3) fail("MultiLinear", "the weight must be [heads, out, in]", matrices.shape());
  heads_ = matrices.shape(0);
  out_ = outputs_of(weight_);
  in_ = inputs_of(weight_);
}

mx::array MultiLinear::product(const mx::array& x, bool transpose) const {
  if (x.ndim() != 4 || (x.shape(1) != heads_ && x.shape(1) != 1) || x.shape(3) != (transpose ? in_ : out_)) {
    fail("MultiLinear",
         "x must be [B, " + std::to_string(heads_) + ", L, " + std::to_string(transpose ? in_ : out_) + "]", x.shape());
  }
  if (const auto* dense = std::get_if<DenseWeight>(&weight_)) {
    const mx::array matrices = mx::astype(*dense, x.dtype());
    return mx::matmul(x, transpose ? mx::swapaxes(matrices, -1, -2) : matrices);
  }
  mx::Shape shape = x.shape();
  shape[1] = heads_;
  const mx::array rows = mx::broadcast_to(x, shape);
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight_)) {
    return mx::quantized_matmul(rows, m->packed, m->scales, std::nullopt, transpose, group_size_of(m->format),
                                bits_of(m->format), name_of(m->format));
  }
  const auto& q = std::get<QuantizedWeight>(weight_);
  return mx::quantized_matmul(rows, q.packed, mx::astype(q.scales, x.dtype()), mx::astype(q.biases, x.dtype()),
                              transpose, q.group_size, q.bits);
}

mx::array MultiLinear::operator()(const mx::array& x) const { return product(x, true); }

mx::array MultiLinear::transposed(const mx::array& x) const { return product(x, false); }

// A stored token costs each query and head 2 R features in the latents' space, Dn + Dv as keys and values, which cost
// R · (Dn + Dv) to make.
bool LatentAttention::makes_keys_for(int L) const {
  const std::int64_t R = embed_q.out();
  const std::int64_t own = std::int64_t{embed_q.in()} + unembed_out.out();
  return L * (2 * R - own) > R * own;
}

mx::array LatentAttention::operator()(const mx::array& content, const mx::array& positions, const KeysValues& stored,
                                      const Mask& mask) const {
  const AttentionScoreOptions options{.scale = scale, .mask = mask};
  if (!makes_keys_for(content.shape(2))) {
    const mx::array queries = joined(embed_q(content), positions);
    return unembed_out(scaled_dot_product_attention(queries, as_one_head(stored), options));
  }
  const auto [latents, key_positions] = as_dense(stored, content.dtype());
  const mx::array keys = embed_q.transposed(latents);
  mx::Shape shape = key_positions.shape();
  shape[1] = embed_q.heads();
  return scaled_dot_product_attention(
      joined(content, positions), DenseKV{joined(keys, mx::broadcast_to(key_positions, shape)), unembed_out(latents)},
      options);
}

}  // namespace reprise
