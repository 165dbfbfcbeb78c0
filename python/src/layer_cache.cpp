// What every cache class has in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "reprise/cache/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

namespace {

nb::object type_of(nb::handle object) { return nb::borrow(object.type()); }

nb::object helper(const char* name) { return nb::module_::import_("reprise._pickle").attr(name); }

// What others gave the object: attributes, slots of a derived class; None for nothing.
nb::object given_to(nb::handle self) {
  const bool derived = !self.type().is(class_type(object_of(self).stored()));
  if (!derived && nb::len(nb::handle(self.attr("__dict__"))) == 0) return nb::none();
  return helper("given_to")(self);
}

void give(const nb::object& to, const nb::object& given) {
  if (!given.is_none()) helper("give")(to, given);
}

// A fork as an object of the same type.
nb::object copied(nb::handle self) {
  nb::object copy = wrap_as(self.type(), object_of(self).cache().fork());
  give(copy, given_to(self));
  return copy;
}

nb::object deep_copied(nb::handle self, const nb::object& memo) {
  nb::object copy = wrap_as(self.type(), object_of(self).cache().fork());
  // Before what it was given, which may lead back here.
  memo[nb::steal(PyLong_FromVoidPtr(self.ptr()))] = copy;
  const nb::object given = given_to(self);
  if (!given.is_none()) give(copy, nb::module_::import_("copy").attr("deepcopy")(given, memo));
  return copy;
}

std::unique_ptr<LayerCache> cache_of_state(nb::handle type, nb::handle state) {
  return cache_from_state(nb::cast<std::string>(type.attr("_class_name")), to_state(state));
}

nb::object from_state(nb::handle type, nb::handle state) {
  // A derived class with a state of its own restores it by itself.
  if (!nb::object(type.attr("state")).is(nb::object(native_type(type).attr("state")))) {
    nb::object object = type.attr("__new__")(type);
    object.attr("state") = state;
    return object;
  }
  return wrap_as(type, cache_of_state(type, state));
}

// What pickle keeps: the type and the class' own record of itself, and what others gave the object, which may lead back
// to it.
nb::tuple reduced(nb::handle self) {
  const LayerCache& cache = object_of(self).cache();
  return nb::make_tuple(helper("restored"),
                        nb::make_tuple(type_of(self), to_python(cache.state()), nb::cast(cache.extra_state())),
                        given_to(self));
}

nb::object unpickled(nb::handle type, nb::handle state, const ExtraState& extra) {
  std::unique_ptr<LayerCache> cache = cache_of_state(type, state);
  cache->set_extra_state(extra);
  return wrap_as(type, std::move(cache));
}

std::string description(nb::handle self) {
  CacheObject& object = object_of(self);
  std::string text = nb::cast<std::string>(self.type().attr("__name__")) + "(";
  if (object.has_written_fields()) return text + "with fields written since its last use)";
  const LayerCache& cache = object.stored();
  if (const auto position = cache.position()) {
    text += "offset=" + std::to_string(*position) + ", ";
  } else if (const auto positions = cache.positions(); !positions.empty()) {
    text += "offset=[";
    for (std::size_t row = 0; row < positions.size(); ++row) {
      text += (row > 0 ? ", " : "") + std::to_string(positions[row]);
    }
    text += "], ";
  }
  return text + "nbytes=" + std::to_string(cache.nbytes()) + ")";
}

}  // namespace

void bind_layer_cache(nb::module_& m) {
  nb::class_<CacheObject> type(m, "LayerCache", nb::sig("class LayerCache(reprise._base._BaseCache)"),
                               "What every cache of one layer can answer. Arrays that it hands out are values: later "
                               "calls never change them. A call that raises leaves the cache as it was.");
  type.def_prop_rw(
          "state", [](CacheObject& self) { return to_python(self.cache().state()); },
          [](nb::handle self, nb::handle value) { set_contents(self, cache_of_state(self.type(), value)); },
          "Whole buffers and numbers, as mlx-lm orders them for the class.")
      .def_prop_ro(
          "nbytes", [](CacheObject& self) { return self.cache().nbytes(); }, "Bytes of the buffers, slack included.")
      .def(
          "size", [](CacheObject& self) { return self.cache().size(); },
          "mlx-lm's number of that name, which some classes answer with 0; see length.")
      .def(
          "length", [](CacheObject& self) { return self.cache().length(); },
          "Stored rows that attention can see; 0 for recurrent state.")
      .def_prop_ro(
          "position", [](CacheObject& self) { return self.cache().position(); },
          "Tokens consumed; None for batches and for caches that do not count.")
      .def_prop_ro(
          "positions", [](CacheObject& self) { return self.cache().positions(); }, "Tokens consumed by each row.")
      .def(
          "empty", [](CacheObject& self) { return self.cache().empty(); }, "No buffer yet.")
      .def("is_trimmable", [](CacheObject& self) { return self.cache().is_trimmable(); })
      .def(
          "max_trim", [](CacheObject& self) { return self.cache().max_trim(); },
          "How many tokens trim can take away so that what remains is all that a shorter history needs.")
      .def(
          "trim", [](CacheObject& self, int n) { return self.cache().trim(n); }, "n"_a,
          "Forgets the last n tokens, or as many as there are. Returns how many; 0, and nothing changes, when the "
          "cache is not trimmable. Raises ValueError for n < 0.")
      .def("fork", &copied, nb::sig("def fork(self) -> typing_extensions.Self"),
           "An independent cache that shares the buffers: no row is copied, whatever the length.")
      .def("__copy__", &copied, nb::sig("def __copy__(self) -> typing_extensions.Self"))
      .def("__deepcopy__", &deep_copied, "memo"_a,
           nb::sig("def __deepcopy__(self, memo: dict[int, typing.Any], /) -> typing_extensions.Self"))
      .def("__reduce__", &reduced, nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"))
      .def("__repr__", &description)
      .def(
          "_assign",
          [](CacheObject& self, CacheObject& other) {
            if (self.stored().class_name() != other.cache().class_name())
              throw nb::type_error("the classes must be equal");
            self.assign(other.cache().fork());
          },
          "other"_a, "Takes the contents of another cache of the class.");
  def_classmethod(type, "from_state", &from_state, nb::arg("cls"), nb::arg("state").none(),
                  nb::sig("def from_state(cls, state: object) -> typing_extensions.Self"));
  m.def("_unpickled", &unpickled);
}

}  // namespace reprise::python
