// The methods of caches that store keys and values, as mlx-lm's classes spell them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "mlx/array.h"
#include "python/src/cache_class.h"
#include "python/src/conversions.h"

namespace reprise::python {

// mlx-lm's class attribute: columns by which buffers grow.
inline constexpr int kStep = 256;

// Casts to the stored rows' dtype where the new ones have another, as mlx-lm's in-place writes do.
nanobind::tuple update_and_fetch(CacheObject& self, const mlx::core::array& keys, const mlx::core::array& values);
nanobind::tuple keys_and_values(CacheObject& self);
nanobind::object make_mask(CacheObject& self, int N, std::optional<int> window, bool return_array);

inline std::string buffer_hint(bool dense) {
  const std::string tensor = "mlx.core.array";
  return dense ? tensor : "tuple[" + tensor + ", " + tensor + ", " + tensor + "]";
}

// keys and values: items 0 and 1 of every state. `dense`: arrays, else triples of them.
template <typename Class>
void def_buffers(Class& type, bool dense) {
  def_field(type, "keys", 0, buffer_hint(dense) + " | None");
  def_field(type, "values", 1, buffer_hint(dense) + " | None");
}

template <typename Class>
void def_updates(Class& type, bool dense) {
  namespace nb = nanobind;
  const std::string pair = "tuple[" + buffer_hint(dense) + ", " + buffer_hint(dense) + "]";
  const std::string update = "def update_and_fetch(self, keys: mlx.core.array, values: mlx.core.array) -> " + pair;
  const std::string fetch = "def keys_and_values(self) -> " + pair;
  type.def(
      "update_and_fetch", &update_and_fetch, nb::arg("keys"), nb::arg("values"), nb::sig(update.c_str()),
      "Appends L rows: keys [B, Hkv, L, D], values [B, Hkv, L, Dv]. Returns everything attention must see, the new "
      "rows included. Raises ValueError for shapes that differ from the first update's.");
  type.def("keys_and_values", &keys_and_values, nb::sig(fetch.c_str()),
           "What attention sees. Raises ValueError when the cache is empty.");
}

// The position of the next token, item `item` of the state.
template <typename Class>
void def_offset(Class& type, std::size_t item) {
  namespace nb = nanobind;
  type.def_prop_rw(
      "offset",
      [item](const CacheObject& self) -> nb::object {
        if (self.has_written_fields()) return to_python(self.field(item));
        return nb::int_(*self.stored().position());
      },
      [item](CacheObject& self, nb::handle value) { self.set_field(item, to_state(value)); },
      nb::for_getter(nb::sig("def offset(self) -> int")),
      nb::for_setter(nb::sig("def offset(self, value: int, /) -> None")));
}

// make_mask in the order of arguments of mlx-lm's growing classes, and in that of its rotating ones.
template <typename Class>
void def_mask(Class& type) {
  namespace nb = nanobind;
  type.def(
      "make_mask",
      [](CacheObject& self, int N, bool return_array, std::optional<int> window_size) {
        return make_mask(self, N, window_size, return_array);
      },
      nb::arg("N"), nb::arg("return_array") = false, nb::arg("window_size") = nb::none(),
      nb::sig("def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> "
              "mlx.core.array | str | None"),
      "The mask for N new tokens, asked before their update: None, \"causal\", or an array, true = may attend.");
}
template <typename Class>
void def_ring_mask(Class& type) {
  namespace nb = nanobind;
  type.def(
      "make_mask",
      [](CacheObject& self, int N, std::optional<int> window_size, bool return_array) {
        if (window_size == 0) window_size.reset();  // mlx-lm: no window of its own
        return make_mask(self, N, window_size, return_array);
      },
      nb::arg("N"), nb::arg("window_size") = nb::none(), nb::arg("return_array") = false,
      nb::sig("def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> "
              "mlx.core.array | str | None"),
      "The mask for N new tokens, asked before their update, in the order in which the update returns the columns.");
}

template <typename Class>
void def_to_quantized(Class& type, const std::string& quantized_class) {
  namespace nb = nanobind;
  const std::string signature = "def to_quantized(self, group_size: int = 64, bits: int = 4) -> " + quantized_class;
  type.def(
      "to_quantized",
      [](CacheObject& self, int group_size, int bits) { return wrap(self.cache().to_quantized(group_size, bits)); },
      nb::arg("group_size") = 64, nb::arg("bits") = 4, nb::sig(signature.c_str()),
      "A new cache of the quantised class with the same rows. Raises ValueError for a group size or bits that MLX does "
      "not know or that do not divide the head size.");
}

}  // namespace reprise::python
