#include "reprise/nn/attention.h"

#include <cmath>
#include <string>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/kernels/attention.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "[scaled_dot_product_attention] " + what);
}

std::string text(const mx::Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

struct Sizes {
  int B, H, L, S, Dv;
};

Sizes check_dense(const mx::array& q, const DenseKV& keys_values) {
  const auto& [k, v] = keys_values;
  const bool fits = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && k.shape(0) == q.shape(0) &&
                    v.shape(0) == q.shape(0) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0 &&
                    v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2) && k.shape(3) == q.shape(3);
  if (!fits) {
    fail("queries [B, H, L, D], keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] must agree, but got " + text(q.shape()) +
         ", " + text(k.shape()) + ", " + text(v.shape()));
  }
  return {q.shape(0), q.shape(1), q.shape(2), k.shape(2), v.shape(3)};
}

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

Sizes check_quantized(const mx::array& queries, const QuantizedKV& keys_values) {
  const auto [group_size, bits] = keys_values.quantization;
  const bool known = (group_size == 32 || group_size == 64 || group_size == 128) && bits >= 2 && bits <= 8 && bits != 7;
  if (!known) {
    fail("group size must be 32, 64 or 128 and bits 2, 3, 4, 5, 6 or 8, but got " + std::to_string(group_size) +
         " and " + std::to_string(bits));
  }
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
  return {queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2), Dv};
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

}  // namespace

mx::array scaled_dot_product_attention(const mx::array& queries, const KeysValues& keys_values,
                                       const AttentionScoreOptions& options) {
  const auto* dense = std::get_if<DenseKV>(&keys_values);
  const Sizes n = dense ? check_dense(queries, *dense) : check_quantized(queries, std::get<QuantizedKV>(keys_values));
  if (const auto* mask = std::get_if<mx::array>(&options.mask)) check_mask(*mask, n);
  if (options.sinks && options.sinks->shape() != mx::Shape{n.H}) {
    fail("sinks must be [" + std::to_string(n.H) + "], but got " + text(options.sinks->shape()));
  }
  if (options.softcap && !(*options.softcap > 0.0f && std::isfinite(*options.softcap))) {
    fail("softcap must be positive, but got " + std::to_string(*options.softcap));
  }
  if (queries.size() == 0 || n.S == 0) return mx::zeros({n.B, n.H, n.L, n.Dv}, queries.dtype());
  return kernels::attention(queries, keys_values,
                            {.scale = options.scale,
                             .mask = options.mask,
                             .sinks = options.sinks,
                             .row_starts = options.row_starts,
                             .softcap = options.softcap});
}

}  // namespace reprise
