#include "reprise/nn/quantized_attention.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>

#include "mlx/ops.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// MLX's CPU quantised product is scalar code whose cost grows with the rows (queries of one key/value head: R · L),
// while BLAS over unpacked keys and values pays the unpacking once. S = 4096, Hkv 3, H 9, D 64, 2 cores, milliseconds
// (quantised product / unpacked) by L: 4 bits 1: 8 / 13, 2: 11 / 16, 4: 26 / 20, 8: 66 / 34, 64: 706 / 269.
constexpr std::size_t kRowsWorthUnpacking = 8;
// Unpacked keys and values above this size must at least be no larger than the scores, which are there anyway.
constexpr std::size_t kUnpackedBytes = std::size_t{256} << 20;

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "[scaled_dot_product_attention] " + what);
}

std::string text(const mx::Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

struct Sizes {
  int B, H, Hkv, L, S, D, Dv;
  int rows() const { return H / Hkv * L; }  // queries that share one head's keys and values
};

// The unpacked size of the last axis; checks that the triple is one.
int unpacked_size(const char* name, const QuantizedTensor& tensor, const KVQuantization& quantization) {
  const auto [group_size, bits] = quantization;
  const auto& [packed, scales, biases] = tensor;
  if (packed.ndim() == 4 && packed.dtype() == mx::uint32 && packed.shape(3) * 32 % bits == 0) {
    const int size = packed.shape(3) * 32 / bits;
    const mx::Shape groups{packed.shape(0), packed.shape(1), packed.shape(2), size / group_size};
    if (size % group_size == 0 && scales.shape() == groups && biases.shape() == groups) return size;
  }
  fail(std::string("quantised ") + name +
       " must be [B, Hkv, S, D * bits / 32] uint32 with scales and biases [B, Hkv, S, D / group_size], "
       "but got " +
       text(packed.shape()) + ", " + text(scales.shape()) + ", " + text(biases.shape()) + " for group size " +
       std::to_string(group_size) + " and " + std::to_string(bits) + " bits");
}

void check_quantization(const KVQuantization& quantization) {
  const auto [group_size, bits] = quantization;
  const bool known = (group_size == 32 || group_size == 64 || group_size == 128) && bits >= 2 && bits <= 8 && bits != 7;
  if (known) return;
  fail("group size must be 32, 64 or 128 and bits 2, 3, 4, 5, 6 or 8, but got " + std::to_string(group_size) + " and " +
       std::to_string(bits));
}

void check_mask(const mx::array& mask, const Sizes& n) {
  const mx::Shape scores{n.B, n.H, n.L, n.S};
  bool fits = mask.ndim() <= scores.size();
  for (std::size_t i = 1; fits && i <= mask.ndim(); ++i) {
    const int size = mask.shape(-static_cast<int>(i));
    fits = size == 1 || size == scores[scores.size() - i];
  }
  if (!fits) fail("the mask must be broadcastable to " + text(scores) + ", but got " + text(mask.shape()));
}

Sizes check(const mx::array& queries, const QuantizedKV& keys_values, const AttentionScoreOptions& options) {
  check_quantization(keys_values.quantization);
  const mx::array& keys = keys_values.keys.packed;
  const mx::array& values = keys_values.values.packed;
  const int D = unpacked_size("keys", keys_values.keys, keys_values.quantization);
  const int Dv = unpacked_size("values", keys_values.values, keys_values.quantization);
  const bool fits = queries.ndim() == 4 && mx::issubdtype(queries.dtype(), mx::floating) &&
                    queries.shape(0) == keys.shape(0) && queries.shape(3) == D && keys.shape(1) > 0 &&
                    queries.shape(1) % keys.shape(1) == 0 && values.shape(0) == keys.shape(0) &&
                    values.shape(1) == keys.shape(1) && values.shape(2) == keys.shape(2);
  if (!fits) {
    fail("queries [B, H, L, D], keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] must agree, but got " +
         text(queries.shape()) + ", packed " + text(keys.shape()) + ", " + text(values.shape()));
  }
  const Sizes n{queries.shape(0), queries.shape(1), keys.shape(1), queries.shape(2), keys.shape(2), D, Dv};
  if (const auto* mask = std::get_if<mx::array>(&options.mask)) check_mask(*mask, n);
  if (options.sinks && options.sinks->shape() != mx::Shape{n.H}) {
    fail("sinks must be [" + std::to_string(n.H) + "], but got " + text(options.sinks->shape()));
  }
  return n;
}

bool worth_unpacking(const Sizes& n) {
  const auto rows = static_cast<std::size_t>(n.rows());
  const auto features = static_cast<std::size_t>(n.D) + static_cast<std::size_t>(n.Dv);
  const auto columns = static_cast<std::size_t>(n.B) * static_cast<std::size_t>(n.Hkv) * static_cast<std::size_t>(n.S);
  return rows >= kRowsWorthUnpacking && (rows >= features || columns * features * sizeof(float) <= kUnpackedBytes);
}

// A GPU's products take packed numbers in every dtype and sum in float32; the CPU's are exact and fast in float32 alone
// (bfloat16: percents off, and 7 times slower; float16: 50 times).
bool on_gpu() { return mx::default_device().type == mx::Device::gpu; }

// x [B, Hkv, rows, D] times the transposed tensor, or x [B, Hkv, rows, S] times the tensor, in x's dtype.
mx::array product(const mx::array& x, const QuantizedTensor& tensor, const KVQuantization& quantization, bool transpose,
                  bool unpack) {
  const auto [group_size, bits] = quantization;
  const mx::array scales = mx::astype(tensor.scales, x.dtype());
  const mx::array biases = mx::astype(tensor.biases, x.dtype());
  if (!unpack) return mx::quantized_matmul(x, tensor.packed, scales, biases, transpose, group_size, bits);
  const mx::array dense = mx::dequantize(tensor.packed, scales, biases, group_size, bits);
  return mx::matmul(x, transpose ? mx::swapaxes(dense, -1, -2) : dense);
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

}  // namespace

mx::array masked_score(mx::Dtype dtype) { return mx::array(static_cast<float>(mx::finfo(dtype).min / 2), dtype); }

mx::array quantized_attention(const mx::array& queries, const QuantizedKV& keys_values,
                              const AttentionScoreOptions& options) {
  const Sizes n = check(queries, keys_values, options);
  const mx::Shape out_shape{n.B, n.H, n.L, n.Dv};
  if (n.B == 0 || n.L == 0 || n.S == 0) return mx::zeros(out_shape, queries.dtype());

  // The queries of one key/value head lie together, so that a product with its keys is one matrix product.
  const int R = n.H / n.Hkv;
  const mx::Shape rows_by_keys{n.B, n.Hkv, R * n.L, n.S};
  const mx::Dtype dtype = on_gpu() ? queries.dtype() : mx::float32;
  const mx::array rows = mx::reshape(mx::multiply(mx::astype(queries, dtype), mx::array(options.scale, dtype)),
                                     {n.B, n.Hkv, R * n.L, n.D});
  const bool unpack = options.may_unpack && !on_gpu() && worth_unpacking(n);
  const mx::array scores = masked(
      mx::reshape(product(rows, keys_values.keys, keys_values.quantization, true, unpack), {n.B, n.Hkv, R, n.L, n.S}),
      options.mask, n);
  const mx::array weights = mx::reshape(mx::softmax(scores, -1, /*precise=*/true), rows_by_keys);
  mx::array out = mx::reshape(product(weights, keys_values.values, keys_values.quantization, false, unpack), out_shape);
  if (options.sinks) {
    // A sink takes exp(sink) / (exp(sink) + sum of exp(scores)) of the weight and gives no value.
    const mx::array total =
        mx::reshape(mx::logsumexp(mx::astype(scores, mx::float32), -1, /*keepdims=*/true), {n.B, n.H, n.L, 1});
    const mx::array sinks = mx::reshape(mx::astype(*options.sinks, mx::float32), {1, n.H, 1, 1});
    out = mx::multiply(out, mx::sigmoid(mx::subtract(total, sinks)));
  }
  return mx::astype(out, queries.dtype());
}

}  // namespace reprise::internal
