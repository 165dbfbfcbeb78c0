#include <limits>
#include <utility>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels::reference {

namespace mx = mlx::core;

namespace {

// [B, L, heads * D] → [B, heads, L, D].
mx::array as_heads(const mx::array& x, int heads) {
  return mx::transpose(mx::reshape(x, {x.shape(0), x.shape(1), heads, -1}), {0, 2, 1, 3});
}

mx::array rotated(const mx::array& x, const RopeParams& rope, const Offset& offset) {
  mx::array input = x;
  if (rope.input_scale != 1.0f) {
    std::vector<mx::array> parts = mx::split(x, mx::Shape{rope.dims}, -1);
    parts[0] = mx::multiply(parts[0], mx::array(rope.input_scale, x.dtype()));
    input = mx::concatenate(parts, -1);
  }
  const mx::array frequencies(rope.frequencies->begin(), {rope.dims / 2}, mx::float32);
  const mx::array periods = mx::reciprocal(frequencies);
  if (const int* position = std::get_if<int>(&offset)) {
    return mx::fast::rope(input, rope.dims, rope.traditional, std::nullopt, rope.scale, *position, periods);
  }
  return mx::fast::rope(input, rope.dims, rope.traditional, std::nullopt, rope.scale, std::get<mx::array>(offset),
                        periods);
}

mx::array stored(const mx::array& x, mx::Dtype dtype) {
  if (x.dtype() == dtype) return x;
  if (dtype != mx::float16) return mx::astype(x, dtype);
  const mx::array largest(65504.0f);
  return mx::astype(mx::clip(mx::astype(x, mx::float32), mx::negative(largest), largest), dtype);
}

mx::array with_columns(const mx::array& x, int columns) {
  mx::Shape stop = x.shape();
  stop[2] = columns;
  return mx::slice(x, mx::Shape(x.ndim(), 0), stop);
}

// `rows` from column `at` on.
mx::array written(const StoreTarget& target, std::size_t i, const mx::array& rows) {
  const int columns = target.tensors.empty() ? 0 : target.tensors[i].shape(2);
  mx::Shape start(4, 0);
  mx::Shape stop = rows.shape();
  start[2] = target.at;
  stop[2] = target.at + rows.shape(2);
  if (columns >= target.capacity) return mx::slice_update(target.tensors[i], rows, start, stop);
  mx::Shape rest = rows.shape();
  rest[2] = target.capacity - target.at - rows.shape(2);
  std::vector<mx::array> parts;
  if (target.at > 0) parts.push_back(with_columns(target.tensors[i], target.at));
  parts.push_back(rows);
  parts.push_back(mx::zeros(rest, rows.dtype()));
  return mx::concatenate(parts, 2);
}

}  // namespace

StoreAndAttendResult store_and_attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                      int heads, const RopeParams* rope, const Offset& offset, StoreTarget target,
                                      const AttentionParams& params, const HeadNorms& norms) {
  const int kv_heads = keys.shape(2) / (queries.shape(2) / heads);
  mx::array q = as_heads(queries, heads);
  mx::array k = as_heads(keys, kv_heads);
  const mx::array v = as_heads(values, kv_heads);
  if (norms.queries) q = reference::rms_norm(q, *norms.queries);
  if (norms.keys) k = reference::rms_norm(k, *norms.keys);
  if (rope) {
    q = rotated(q, *rope, offset);
    k = rotated(k, *rope, offset);
  }
  std::vector<mx::array> rows;
  for (const mx::array& x : {k, v}) {
    const std::size_t scales = target.quantization ? rows.size() + 1 : rows.size();
    const mx::Dtype dtype = target.tensors.empty() ? target.dtype.value_or(x.dtype()) : target.tensors[scales].dtype();
    if (!target.quantization) {
      rows.push_back(stored(x, dtype));
    } else {
      for (mx::array& tensor :
           mx::quantize(stored(x, dtype), target.quantization->group_size, target.quantization->bits)) {
        rows.push_back(std::move(tensor));
      }
    }
  }
  std::vector<mx::array> tensors;
  for (std::size_t i = 0; i < rows.size(); ++i) tensors.push_back(written(target, i, rows[i]));

  const auto seen = [&](std::size_t i) { return with_columns(tensors[i], target.visible); };
  const KeysValues all =
      target.quantization
          ? KeysValues(QuantizedKV{{seen(0), seen(1), seen(2)}, {seen(3), seen(4), seen(5)}, *target.quantization})
          : KeysValues(DenseKV{seen(0), seen(1)});
  const mx::array out = mx::transpose(reference::attention(q, all, params), {0, 2, 1, 3});
  return {mx::reshape(out, {out.shape(0), out.shape(1), -1}), std::move(tensors)};
}

}  // namespace reprise::kernels::reference
