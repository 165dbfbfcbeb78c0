// Attention under the names and signatures of mlx_lm.models.base.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "python/src/bindings.h"
#include "reprise/base/error.h"
#include "reprise/nn/attention.h"
#include "reprise/nn/keys_values.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace reprise::python {

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "[scaled_dot_product_attention] " + what);
}

[[noreturn]] void fail_type(const std::string& what, nb::handle value) {
  throw nb::type_error((what + ", but got " + nb::type_name(value.type()).c_str()).c_str());
}

mx::array to_array(nb::handle value, const char* name) {
  if (!nb::isinstance<mx::array>(value)) fail_type(std::string(name) + " must be an mx.array", value);
  return nb::cast<mx::array>(value);
}

Mask to_mask(nb::handle value) {
  if (value.is_none()) return NoMask{};
  if (nb::isinstance<mx::array>(value)) return nb::cast<mx::array>(value);
  if (!nb::isinstance<nb::str>(value)) fail_type("mask must be None, \"causal\" or an mx.array", value);
  const auto mode = nb::cast<std::string>(value);
  if (mode != "causal") fail("a mask that is a string must be \"causal\", but got \"" + mode + "\"");
  return Causal{};
}

int number_of(nb::handle cache, const char* name) {
  const nb::object value = cache.attr(name);
  int number = 0;
  if (!nb::try_cast(value, number)) fail_type(std::string(name) + " of the cache must be an integer", value);
  return number;
}

QuantizedTensor to_tensor(nb::handle value, const char* name) {
  if (!nb::isinstance<nb::sequence>(value)) {
    fail_type(std::string("quantised ") + name + " must be a tuple (packed, scales, biases)", value);
  }
  const auto parts = nb::borrow<nb::sequence>(value);
  if (nb::len(parts) != 3) {
    fail(std::string("quantised ") + name + " must be (packed, scales, biases), but got " +
         std::to_string(nb::len(parts)) + " arrays");
  }
  return {to_array(parts[0], name), to_array(parts[1], name), to_array(parts[2], name)};
}

// --- What mlx-lm's composition of MLX operations takes by their broadcasting and promotion, and our attention does
// not.

// [Hkv, …] or [1, Hkv, …] → [B, Hkv, …], without a copy.
mx::array with_batch(const mx::array& x, int batch) {
  if (x.ndim() != 3 && (x.ndim() != 4 || x.shape(0) != 1 || batch <= 1)) return x;
  mx::Shape shape = x.shape();
  if (shape.size() == 3) shape.insert(shape.begin(), batch);
  shape[0] = batch;
  return mx::broadcast_to(x, shape);
}

QuantizedTensor with_batch(const QuantizedTensor& x, int batch) {
  return {with_batch(x.packed, batch), with_batch(x.scales, batch), with_batch(x.biases, batch)};
}

// A mask of a value per key/value head [B, Hkv, L, S], or per query head of a group [R, L, S] → per query head.
mx::array per_query_head(mx::array mask, int heads, int kv_heads) {
  while (mask.ndim() > 4 && mask.shape(0) == 1) mask = mx::squeeze(mask, 0);
  if (mask.ndim() != 3 && mask.ndim() != 4) return mask;
  const int given = mask.shape(-3);
  const int repeats = kv_heads > 0 ? heads / kv_heads : 0;
  if (given == 1 || given == heads) return mask;
  if (mask.ndim() == 4 && given == kv_heads) return mx::repeat(mask, repeats, 1);
  if (mask.ndim() == 3 && given == repeats) return mx::tile(mask, {kv_heads, 1, 1});
  return mask;
}

// The dtype of the result is the one to which all that is multiplied or added promotes.
mx::Dtype result_dtype(const mx::array& queries, const QuantizedTensor& keys, const QuantizedTensor& values,
                       const Mask& mask) {
  mx::Dtype dtype = mx::issubdtype(queries.dtype(), mx::inexact) ? queries.dtype() : mx::float32;
  for (const mx::array* x : {&keys.scales, &keys.biases, &values.scales, &values.biases}) {
    dtype = mx::promote_types(dtype, x->dtype());
  }
  if (const auto* array = std::get_if<mx::array>(&mask)) dtype = mx::promote_types(dtype, array->dtype());
  return dtype;
}

mx::array attend_quantized(const mx::array& queries, nb::handle q_keys, nb::handle q_values, float scale,
                           nb::handle mask_value, const std::optional<mx::array>& sinks, int group_size, int bits) {
  QuantizedTensor keys = to_tensor(q_keys, "keys");
  QuantizedTensor values = to_tensor(q_values, "values");
  Mask mask = to_mask(mask_value);
  if (queries.ndim() == 4) {
    const int batch = queries.shape(0);
    keys = with_batch(keys, batch);
    values = with_batch(values, batch);
    if (auto* array = std::get_if<mx::array>(&mask); array != nullptr && keys.packed.ndim() == 4) {
      *array = per_query_head(*array, queries.shape(1), keys.packed.shape(1));
    }
  }
  const mx::array typed = mx::astype(queries, result_dtype(queries, keys, values, mask));
  return scaled_dot_product_attention(typed, QuantizedKV{keys, values, {group_size, bits}},
                                      {.scale = scale, .mask = mask, .sinks = sinks});
}

// MLX's kernel itself: nothing of ours could add to it, and the caller gets the numbers that mlx-lm gets, bit for bit,
// also where our attention differs (a row masked by -inf throughout, keys and values wider than the queries).
mx::array attend_dense(const mx::array& queries, nb::handle keys, nb::handle values, float scale, nb::handle mask_value,
                       const std::optional<mx::array>& sinks) {
  const Mask mask = to_mask(mask_value);
  const auto* array = std::get_if<mx::array>(&mask);
  return mx::fast::scaled_dot_product_attention(queries, to_array(keys, "keys"), to_array(values, "values"), scale,
                                                std::holds_alternative<Causal>(mask) ? "causal" : "",
                                                array != nullptr ? std::optional(*array) : std::nullopt, sinks);
}

mx::array attend(const mx::array& queries, nb::object keys, nb::object values, nb::object cache, float scale,
                 nb::object mask, const std::optional<mx::array>& sinks) {
  if (!nb::hasattr(cache, "bits")) return attend_dense(queries, keys, values, scale, mask, sinks);
  return attend_quantized(queries, keys, values, scale, mask, sinks, number_of(cache, "group_size"),
                          number_of(cache, "bits"));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("scaled_dot_product_attention", &attend, "queries"_a, "keys"_a, "values"_a, "cache"_a.none(), "scale"_a,
        "mask"_a.none(), "sinks"_a.none() = nb::none(),
        nb::sig("def scaled_dot_product_attention(queries: mlx.core.array, "
                "keys: mlx.core.array | collections.abc.Sequence[mlx.core.array], "
                "values: mlx.core.array | collections.abc.Sequence[mlx.core.array], cache: object, scale: float, "
                "mask: mlx.core.array | str | None, sinks: mlx.core.array | None = None) -> mlx.core.array"),
        R"(softmax(scale * queries @ keys.T + mask) @ values, with grouped heads.

Args:
  queries: [B, H, L, D].
  keys, values: what `cache.update_and_fetch` gave: arrays [B, Hkv, S, D] and [B, Hkv, S, Dv], or of a quantised cache
    (one with `bits` and `group_size`) the triples (packed, scales, biases). H is a multiple of Hkv.
  cache: the cache that the keys and values are of, or None.
  mask: None, "causal" (the last query sees every key), or an array that broadcasts to [B, H, L, S]: bool (true: may
    attend), or added to the scores.
  sinks: [H], an extra logit per head in the softmax's denominator.

Returns:
  [B, H, L, Dv]. Dense: what mx.fast.scaled_dot_product_attention gives. Quantised: softmax and sums are float32, and
  a row in which everything is masked is finite. The arguments stay as they are.

Raises:
  ValueError: shapes, dtypes or a quantisation that do not fit.)");

  m.def(
      "quantized_scaled_dot_product_attention",
      [](const mx::array& queries, nb::object q_keys, nb::object q_values, float scale, nb::object mask, int group_size,
         int bits) { return attend_quantized(queries, q_keys, q_values, scale, mask, std::nullopt, group_size, bits); },
      "queries"_a, "q_keys"_a, "q_values"_a, "scale"_a, "mask"_a.none(), "group_size"_a = 64, "bits"_a = 8,
      nb::sig("def quantized_scaled_dot_product_attention(queries: mlx.core.array, "
              "q_keys: collections.abc.Sequence[mlx.core.array], q_values: collections.abc.Sequence[mlx.core.array], "
              "scale: float, mask: mlx.core.array | str | None, group_size: int = 64, bits: int = 8) "
              "-> mlx.core.array"),
      R"(`scaled_dot_product_attention` over the triples (packed, scales, biases) of a quantised cache.)");
}

}  // namespace reprise::python
