#include "python/src/attention_methods.h"

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace reprise::python {

namespace {

struct Dtypes {
  mx::Dtype keys;
  mx::Dtype values;
};

Dtypes stored_dtypes(const AttentionCache& cache) {
  const KeysValues stored = cache.keys_and_values();
  if (const auto* dense = std::get_if<DenseKV>(&stored)) return {dense->keys.dtype(), dense->values.dtype()};
  const auto& quantized = std::get<QuantizedKV>(stored);
  return {quantized.keys.scales.dtype(), quantized.values.scales.dtype()};
}

// Rows are numbers with a point here, and integers in tests of mlx-lm's users.
mx::array floating(const mx::array& rows) {
  return mx::issubdtype(rows.dtype(), mx::integer) ? mx::astype(rows, mx::float32) : rows;
}

}  // namespace

nb::tuple update_and_fetch(CacheObject& self, const mx::array& keys, const mx::array& values) {
  AttentionCache& cache = self.attention();
  try {
    return to_python(cache.update_and_fetch(keys, values));
  } catch (const Error& error) {
    // Nothing was stored. Only now, so that the usual update does not pay for the questions.
    if (error.code() != ErrorCode::invalid_argument) throw;
    if (cache.empty()) return to_python(cache.update_and_fetch(floating(keys), floating(values)));
    const Dtypes stored = stored_dtypes(cache);
    if (stored.keys == keys.dtype() && stored.values == values.dtype()) throw;
    return to_python(cache.update_and_fetch(mx::astype(keys, stored.keys), mx::astype(values, stored.values)));
  }
}

nb::tuple keys_and_values(CacheObject& self) { return to_python(self.attention().keys_and_values()); }

nb::object make_mask(CacheObject& self, int N, std::optional<int> window, bool return_array) {
  return to_python(self.attention().make_mask(N, {.window = window, .return_array = return_array}));
}

}  // namespace reprise::python
