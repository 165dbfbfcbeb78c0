// The caches of one sequence.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <vector>

#include "python/src/attention_methods.h"
#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

template <>
const std::vector<const char*>& fields_of<KVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<ConcatenateKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<QuantizedKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset", "group_size", "bits"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<RotatingKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset", "keep", "max_size", "_idx"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<QuantizedRotatingKVCache>() {
  static const std::vector<const char*> fields = {"keys",     "values", "offset",     "keep",
                                                  "max_size", "_idx",   "group_size", "bits"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<ChunkedKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset", "chunk_size", "start_position"};
  return fields;
}

void bind_caches(nb::module_& m) {
  auto kv = cache_class<KVCache>(m, "Keeps every row, grows by 256 columns.");
  kv.def("__init__", [](Bound<KVCache>* self) { new (self) Bound<KVCache>(std::make_unique<KVCache>()); });
  def_buffers(kv, true);
  def_offset(kv, 2);
  def_updates(kv, true);
  def_mask(kv);
  def_to_quantized(kv, "QuantizedKVCache");
  def_merge(kv, "BatchKVCache");

  auto concatenate = cache_class<ConcatenateKVCache>(m, "Concatenates at every update: for big blocks.");
  concatenate.def("__init__", [](Bound<ConcatenateKVCache>* self) {
    new (self) Bound<ConcatenateKVCache>(std::make_unique<ConcatenateKVCache>());
  });
  def_buffers(concatenate, true);
  def_offset(concatenate, 2);
  def_updates(concatenate, true);
  def_mask(concatenate);

  auto quantized = cache_class<QuantizedKVCache>(m, "KVCache over rows of 2 to 8 bits, each quantised once.");
  quantized.def(
      "__init__",
      [](Bound<QuantizedKVCache>* self, int group_size, int bits) {
        new (self) Bound<QuantizedKVCache>(std::make_unique<QuantizedKVCache>(group_size, bits));
      },
      "group_size"_a = 64, "bits"_a = 8);
  def_buffers(quantized, false);
  def_offset(quantized, 2);
  def_field(quantized, "group_size", 3, "int");
  def_field(quantized, "bits", 4, "int");
  def_updates(quantized, false);
  def_mask(quantized);

  auto rotating = cache_class<RotatingKVCache>(m, "A ring of the first `keep` rows and the most recent others.");
  rotating.def(
      "__init__",
      [](Bound<RotatingKVCache>* self, int max_size, int keep) {
        new (self) Bound<RotatingKVCache>(std::make_unique<RotatingKVCache>(max_size, keep));
      },
      "max_size"_a, "keep"_a = 0);
  def_buffers(rotating, true);
  def_offset(rotating, 2);
  def_field(rotating, "keep", 3, "int");
  def_field(rotating, "max_size", 4, "int");
  def_field(rotating, "_idx", 5, "int");
  def_updates(rotating, true);
  def_ring_mask(rotating);
  def_to_quantized(rotating, "QuantizedRotatingKVCache");
  def_merge(rotating, "BatchRotatingKVCache");

  auto quantized_rotating = cache_class<QuantizedRotatingKVCache>(m, "RotatingKVCache over rows of 2 to 8 bits.");
  quantized_rotating.def(
      "__init__",
      [](Bound<QuantizedRotatingKVCache>* self, int max_size, int keep, int group_size, int bits) {
        new (self) Bound<QuantizedRotatingKVCache>(
            std::make_unique<QuantizedRotatingKVCache>(max_size, keep, group_size, bits));
      },
      "max_size"_a, "keep"_a = 0, "group_size"_a = 64, "bits"_a = 8);
  def_buffers(quantized_rotating, false);
  def_offset(quantized_rotating, 2);
  def_field(quantized_rotating, "keep", 3, "int");
  def_field(quantized_rotating, "max_size", 4, "int");
  def_field(quantized_rotating, "_idx", 5, "int");
  def_field(quantized_rotating, "group_size", 6, "int");
  def_field(quantized_rotating, "bits", 7, "int");
  def_updates(quantized_rotating, false);
  def_ring_mask(quantized_rotating);

  // mlx-lm's class has no make_mask, and models ask for that.
  auto chunked = cache_class<ChunkedKVCache>(m, "For attention within chunks of the sequence.");
  chunked.def(
      "__init__",
      [](Bound<ChunkedKVCache>* self, int chunk_size) {
        new (self) Bound<ChunkedKVCache>(std::make_unique<ChunkedKVCache>(chunk_size));
      },
      "chunk_size"_a);
  def_buffers(chunked, true);
  def_offset(chunked, 2);
  def_field(chunked, "chunk_size", 3, "int");
  def_field(chunked, "start_position", 4, "int");
  def_updates(chunked, true);
  chunked.def(
      "maybe_trim_front", [](CacheObject& self) { self.as<ChunkedKVCache>().maybe_trim_front(); },
      "Keeps the last chunk_size rows when there are more.");

  for (nb::handle type : {nb::handle(kv), nb::handle(quantized), nb::handle(rotating), nb::handle(quantized_rotating),
                          nb::handle(chunked)}) {
    type.attr("step") = kStep;
  }
}

}  // namespace reprise::python
