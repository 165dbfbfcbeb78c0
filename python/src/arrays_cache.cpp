// Slots of recurrent state.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/src/batch_methods.h"
#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "reprise/cache/arrays_cache.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace reprise::python {

template <>
const std::vector<const char*>& fields_of<ArraysCache>() {
  static const std::vector<const char*> fields = {"cache", "left_padding", "lengths"};
  return fields;
}

namespace {

constexpr std::size_t kSlots = 0;

ArraysCache& arrays(CacheObject& self) { return self.as<ArraysCache>(); }

// What Python takes for an index. It may run code of the caller's, hence before any reference into the cache is taken.
// Throws: TypeError, IndexError.
Py_ssize_t index_of(nb::handle idx) {
  const Py_ssize_t index = PyNumber_AsSsize_t(idx.ptr(), PyExc_IndexError);
  if (index == -1 && PyErr_Occurred()) nb::raise_python_error();
  return index;
}

// As Python's lists count, so that iterating and unpacking end. Throws: IndexError.
int slot_of(const ArraysCache& cache, Py_ssize_t index) {
  const Py_ssize_t slot = index < 0 ? index + cache.num_slots() : index;
  if (slot < 0 || slot >= cache.num_slots()) {
    throw nb::index_error(
        ("a slot must be one of " + std::to_string(cache.num_slots()) + ", but got " + std::to_string(index)).c_str());
  }
  return static_cast<int>(slot);
}

nb::list slots(const CacheObject& self) { return nb::list(to_python(self.field(kSlots))); }

nb::object get(CacheObject& self, nb::handle idx) {
  if (PySlice_Check(idx.ptr())) return nb::object(slots(self))[idx];
  const Py_ssize_t index = index_of(idx);
  const ArraysCache& cache = arrays(self);
  const auto value = cache.get(slot_of(cache, index));
  return value ? nb::cast(*value) : nb::none();
}

void set(CacheObject& self, nb::handle idx, nb::handle value) {
  if (PySlice_Check(idx.ptr())) {
    nb::object all = slots(self);
    all[idx] = value;
    self.set_field(kSlots, to_state(all));
    return;
  }
  const Py_ssize_t index = index_of(idx);
  if (!value.is_none() && !nb::isinstance<mx::array>(value)) {
    throw nb::type_error("a slot must hold an mlx.core.array or None");
  }
  ArraysCache& cache = arrays(self);
  cache.set(slot_of(cache, index), value.is_none() ? std::nullopt : std::optional(nb::cast<mx::array>(value)));
}

}  // namespace

void bind_arrays_cache(nb::module_& m) {
  auto type =
      cache_class<ArraysCache>(m, "Slots for recurrent state: the model reads one, and puts the next state back.");
  type.def(
      "__init__",
      [](Bound<ArraysCache>* self, int size, nb::handle left_padding) {
        new (self)
            Bound<ArraysCache>(std::make_unique<ArraysCache>(size, to_ints_or_none(left_padding, "left_padding")));
      },
      "size"_a, "left_padding"_a.none() = nb::none(),
      nb::sig(
          "def __init__(self, size: int, left_padding: collections.abc.Sequence[int] | mlx.core.array | None = None) "
          "-> None"));
  type.def("__getitem__", &get, "idx"_a, nb::sig("def __getitem__(self, idx: int, /) -> mlx.core.array | None"));
  type.def("__setitem__", &set, "idx"_a, "value"_a.none(),
           nb::sig("def __setitem__(self, idx: int, value: mlx.core.array | None, /) -> None"));
  // A list that writes through, so that `c.cache[i] = …` is what it looks like.
  type.def_prop_rw(
      "cache",
      [](nb::handle self) {
        return nb::module_::import_("reprise._slots").attr("Slots")(self, slots(object_of(self)));
      },
      [](CacheObject& self, nb::handle value) { self.set_field(kSlots, to_state(value)); },
      nb::for_getter(nb::sig("def cache(self) -> list[mlx.core.array | None]")),
      nb::for_setter(nb::sig("def cache(self, value: collections.abc.Sequence[mlx.core.array | None], /) -> None")));
  // As mlx-lm: the slots are a list.
  type.def_prop_rw(
      "state",
      [](CacheObject& self) {
        const State state = self.cache().state();
        const State::List& items = *state.as_list();
        return nb::make_tuple(nb::list(to_python(items[0])), to_python(items[1]), to_python(items[2]));
      },
      [](nb::handle self, nb::handle value) { set_contents(self, ArraysCache::from_state(to_state(value))); });
  def_counts(type, "left_padding", 1, "mlx.core.array | None");
  def_counts(type, "lengths", 2, "mlx.core.array | None");
  type.def_prop_ro("batch_size", [](CacheObject& self) { return arrays(self).batch_size(); });
  type.def(
      "make_mask", [](CacheObject& self, int N) { return to_python(arrays(self).make_mask(N)); }, "N"_a,
      nb::sig("def make_mask(self, N: int) -> mlx.core.array | None"),
      "Which of the next N columns hold real tokens: bool [B, N], or None without paddings.");
  type.def(
      "prepare",
      [](CacheObject& self, nb::handle lengths, const nb::kwargs&) {
        BatchPrompt prompt{.lengths = to_ints_or_none(lengths, "lengths")};  // may run code that changes the cache
        self.batch().prepare(prompt);
      },
      "lengths"_a.none() = nb::none(), "kwargs"_a,
      nb::sig(
          "def prepare(self, lengths: collections.abc.Sequence[int] | mlx.core.array | None = None, **kwargs: object) "
          "-> None"),
      "Announces a right-padded prompt by the number of real tokens of each row.");
  type.def(
      "advance", [](CacheObject& self, int N) { self.batch().advance(N); }, "N"_a,
      "N more columns of the prompt were processed.");
  def_rows(type, "ArraysCache");
  def_merge(type, "ArraysCache");
}

}  // namespace reprise::python
