// The caches of several sequences that store keys and values.
#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "python/src/attention_methods.h"
#include "python/src/batch_methods.h"
#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "reprise/base/error.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

template <>
const std::vector<const char*>& fields_of<BatchKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset", "left_padding", "_idx"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<BatchChunkedKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values", "offset", "left_padding", "_idx", "chunk_size"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<BatchQuantizedKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values",     "offset", "left_padding",
                                                  "_idx", "group_size", "bits"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<BatchRotatingKVCache>() {
  static const std::vector<const char*> fields = {"keys",     "values",  "offset", "left_padding",
                                                  "max_size", "_offset", "_idx",   "rotated"};
  return fields;
}
template <>
const std::vector<const char*>& fields_of<BatchQuantizedRotatingKVCache>() {
  static const std::vector<const char*> fields = {"keys", "values",  "offset", "left_padding", "max_size", "_offset",
                                                  "_idx", "rotated", "keep",   "group_size",   "bits"};
  return fields;
}

namespace {

// Writes what tells of a pending prompt, the member `name` of the extra state; None ends it. To write None while
// nothing is pending is no use of the cache: mlx-lm's objects are mended so when they were made from a state.
void set_pending(CacheObject& self, const char* name, nb::handle value) {
  if (value.is_none() && !batched(self.stored())->is_in_padded_prompt()) return;
  const std::vector<int> numbers = to_ints_or_none(value, name);
  const LayerCache& cache = self.cache();
  ExtraState extra = cache.extra_state();
  if (value.is_none()) {
    extra.erase(name);
  } else {
    extra[name] = numbers;
  }
  auto next = cache_from_state(cache.class_name(), cache.state());
  try {
    next->set_extra_state(extra);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, error.what());
  }
  self.assign(std::move(next));
}

// Of a right-padded prompt that is not over; None otherwise.
template <typename Class>
void def_pending_padding(Class& type) {
  type.def_prop_rw(
      "_right_padding",
      [](const CacheObject& self) -> nb::object {
        const auto& columns = dynamic_cast<const internal::BatchGrowingCache&>(self.stored()).right_padding();
        return columns.empty() ? nb::object(nb::none()) : nb::cast(int_array(columns));
      },
      [](CacheObject& self, nb::handle value) { set_pending(self, "right_padding", value); },
      nb::for_getter(nb::sig("def _right_padding(self) -> mlx.core.array | None")),
      nb::for_setter(nb::sig("def _right_padding(self, value: mlx.core.array | None, /) -> None")),
      nb::for_setter(nb::arg("value").none()));
}
template <typename Class>
void def_pending_lengths(Class& type) {
  type.def_prop_rw(
      "_lengths",
      [](const CacheObject& self) -> nb::object {
        const LayerCache& cache = self.stored();
        if (!batched(cache)->is_in_padded_prompt()) return nb::none();
        return nb::cast(int_array(std::get<std::vector<int>>(cache.extra_state().at("lengths"))));
      },
      [](CacheObject& self, nb::handle value) { set_pending(self, "lengths", value); },
      nb::for_getter(nb::sig("def _lengths(self) -> mlx.core.array | None")),
      nb::for_setter(nb::sig("def _lengths(self, value: mlx.core.array | None, /) -> None")),
      nb::for_setter(nb::arg("value").none()));
}

// Items 2 and 3 of every batch's state.
template <typename Class>
void def_row_numbers(Class& type) {
  def_counts(type, "offset", 2, "mlx.core.array");
  def_counts(type, "left_padding", 3, "mlx.core.array");
}

}  // namespace

void bind_batch_caches(nb::module_& m) {
  auto kv = cache_class<BatchKVCache>(m, "Rows that end at one column, shorter ones after padding.");
  kv.def(
      "__init__",
      [](Bound<BatchKVCache>* self, nb::handle left_padding) {
        new (self) Bound<BatchKVCache>(std::make_unique<BatchKVCache>(to_ints(left_padding, "left_padding")));
      },
      "left_padding"_a,
      nb::sig("def __init__(self, left_padding: collections.abc.Sequence[int] | mlx.core.array) -> None"));
  def_buffers(kv, true);
  def_row_numbers(kv);
  def_field(kv, "_idx", 4, "int");
  def_updates(kv, true);
  def_mask(kv);
  def_prepare(kv);
  def_rows(kv, "KVCache");
  def_pending_padding(kv);
  def_merge(kv, "BatchKVCache");

  auto chunked = cache_class<BatchChunkedKVCache>(m, "BatchKVCache of attention within chunks of each row's sequence.");
  chunked.def(
      "__init__",
      [](Bound<BatchChunkedKVCache>* self, int chunk_size, nb::handle left_padding) {
        new (self) Bound<BatchChunkedKVCache>(
            std::make_unique<BatchChunkedKVCache>(chunk_size, to_ints(left_padding, "left_padding")));
      },
      "chunk_size"_a, "left_padding"_a);
  def_buffers(chunked, true);
  def_row_numbers(chunked);
  def_field(chunked, "_idx", 4, "int");
  def_field(chunked, "chunk_size", 5, "int");
  def_updates(chunked, true);
  def_mask(chunked);
  def_prepare(chunked);
  def_rows(chunked, "ChunkedKVCache");
  def_pending_padding(chunked);
  def_merge(chunked, "BatchChunkedKVCache");
  chunked.def(
      "maybe_trim_front", [](CacheObject& self) { self.as<BatchChunkedKVCache>().maybe_trim_front(); },
      "Keeps the last chunk_size columns when there are more and no padded prompt is under way.");

  auto quantized = cache_class<BatchQuantizedKVCache>(m, "BatchKVCache over rows of 2 to 8 bits.");
  quantized.def(
      "__init__",
      [](Bound<BatchQuantizedKVCache>* self, nb::handle left_padding, int group_size, int bits) {
        new (self) Bound<BatchQuantizedKVCache>(
            std::make_unique<BatchQuantizedKVCache>(to_ints(left_padding, "left_padding"), group_size, bits));
      },
      "left_padding"_a, "group_size"_a = 64, "bits"_a = 8);
  def_buffers(quantized, false);
  def_row_numbers(quantized);
  def_field(quantized, "_idx", 4, "int");
  def_field(quantized, "group_size", 5, "int");
  def_field(quantized, "bits", 6, "int");
  def_updates(quantized, false);
  def_mask(quantized);
  def_prepare(quantized);
  def_rows(quantized, "QuantizedKVCache");
  def_pending_padding(quantized);
  def_merge(quantized, "BatchQuantizedKVCache");

  auto rotating = cache_class<BatchRotatingKVCache>(
      m, "Each row sees its first `keep` tokens and its most recent others, as its RotatingKVCache alone would.");
  rotating.def(
      "__init__",
      [](Bound<BatchRotatingKVCache>* self, int max_size, nb::handle left_padding, int keep) {
        new (self) Bound<BatchRotatingKVCache>(
            std::make_unique<BatchRotatingKVCache>(max_size, to_ints(left_padding, "left_padding"), keep));
      },
      "max_size"_a, "left_padding"_a, "keep"_a = 0);
  def_buffers(rotating, true);
  def_row_numbers(rotating);
  def_field(rotating, "max_size", 4, "int");
  def_field(rotating, "_offset", 5, "int");
  def_field(rotating, "_idx", 6, "int");
  def_field(rotating, "rotated", 7, "bool");
  rotating.def_prop_ro("keep", [](CacheObject& self) { return self.as<BatchRotatingKVCache>().keep(); });
  def_updates(rotating, true);
  def_ring_mask(rotating);
  def_to_quantized(rotating, "BatchQuantizedRotatingKVCache");
  def_prepare(rotating);
  def_rows(rotating, "RotatingKVCache");
  def_pending_lengths(rotating);
  def_merge(rotating, "BatchRotatingKVCache");

  auto quantized_rotating =
      cache_class<BatchQuantizedRotatingKVCache>(m, "BatchRotatingKVCache over rows of 2 to 8 bits.");
  quantized_rotating.def(
      "__init__",
      [](Bound<BatchQuantizedRotatingKVCache>* self, int max_size, nb::handle left_padding, int keep, int group_size,
         int bits) {
        new (self) Bound<BatchQuantizedRotatingKVCache>(std::make_unique<BatchQuantizedRotatingKVCache>(
            max_size, to_ints(left_padding, "left_padding"), keep, group_size, bits));
      },
      "max_size"_a, "left_padding"_a, "keep"_a = 0, "group_size"_a = 64, "bits"_a = 8);
  def_buffers(quantized_rotating, false);
  def_row_numbers(quantized_rotating);
  def_field(quantized_rotating, "max_size", 4, "int");
  def_field(quantized_rotating, "_offset", 5, "int");
  def_field(quantized_rotating, "_idx", 6, "int");
  def_field(quantized_rotating, "rotated", 7, "bool");
  def_field(quantized_rotating, "keep", 8, "int");
  def_field(quantized_rotating, "group_size", 9, "int");
  def_field(quantized_rotating, "bits", 10, "int");
  def_updates(quantized_rotating, false);
  def_ring_mask(quantized_rotating);
  def_prepare(quantized_rotating);
  def_rows(quantized_rotating, "QuantizedRotatingKVCache");
  def_pending_lengths(quantized_rotating);
  def_merge(quantized_rotating, "BatchQuantizedRotatingKVCache");

  for (nb::handle type :
       {nb::handle(kv), nb::handle(quantized), nb::handle(rotating), nb::handle(quantized_rotating)}) {
    type.attr("step") = kStep;
  }
}

}  // namespace reprise::python
