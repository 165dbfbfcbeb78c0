// How a cache class of ours becomes a Python class: one type a class, found by the class' name.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/src/cache_object.h"
#include "python/src/conversions.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::python {

// The items of the class' state, named as mlx-lm's attributes, for each class that is bound.
template <typename Cache>
const std::vector<const char*>& fields_of();

template <typename Cache>
class Bound : public CacheObject {
 public:
  explicit Bound(std::unique_ptr<LayerCache> cache) : CacheObject(std::move(cache), fields_of<Cache>()) {}
};

// Makes the cache the contents of an object of the class (or of one derived from it) whose __init__ has not run.
using Construct = void (*)(nanobind::handle object, std::unique_ptr<LayerCache> cache);
void register_class(const std::string& class_name, nanobind::handle type, Construct construct);
// The type registered for the class of `type`, which is that one or derived from it.
nanobind::handle native_type(nanobind::handle type);

// The Python type of the cache's class, from which others may be derived.
nanobind::handle class_type(const LayerCache& cache);

// A new Python object of the cache's class; a CacheList becomes reprise.cache.CacheList.
nanobind::object wrap(std::unique_ptr<LayerCache> cache);
// The same, of a type derived from it. Throws: TypeError when `type` is no class of that cache.
nanobind::object wrap_as(nanobind::handle type, std::unique_ptr<LayerCache> cache);

// Makes the cache the contents of an object, also where its __init__ has not run: what mlx-lm's from_state does.
// Throws: TypeError when the object is none of the cache's class.
void set_contents(nanobind::handle object, std::unique_ptr<LayerCache> cache);

// What a native cache holds. Throws: TypeError for any other object, and for one whose __init__ has not run.
CacheObject& object_of(nanobind::handle object);
// A fork of what a Python object holds: of a native cache, or of a reprise.cache.CacheList of such.
// Throws: TypeError for any other object.
std::unique_ptr<LayerCache> fork_of(nanobind::handle object);
// All of a list's caches are native, or CacheLists of such.
bool is_native(nanobind::handle object);

// A batch of native caches. Throws: TypeError for any other object; as merge_caches.
nanobind::object merged(nanobind::handle caches);

template <typename Cache>
nanobind::class_<Bound<Cache>, CacheObject> cache_class(nanobind::module_& m, const char* doc) {
  namespace nb = nanobind;
  nb::class_<Bound<Cache>, CacheObject> type(m, Cache::kClassName, nb::dynamic_attr(), nb::is_weak_referenceable(),
                                             doc);
  register_class(Cache::kClassName, type, [](nb::handle object, std::unique_ptr<LayerCache> cache) {
    new (nb::inst_ptr<Bound<Cache>>(object)) Bound<Cache>(std::move(cache));
    nb::inst_mark_ready(object);
  });
  type.attr("_class_name") = Cache::kClassName;
  return type;
}

// A field that is an item of the state. `hint`: its type, for stubs.
template <typename Class>
void def_field(Class& type, const std::string& name, std::size_t item, const std::string& hint) {
  namespace nb = nanobind;
  const std::string getter = "def " + name + "(self) -> " + hint;
  const std::string setter = "def " + name + "(self, value: " + hint + ", /) -> None";
  type.def_prop_rw(
      name.c_str(), [item](const CacheObject& self) { return to_python(self.field(item)); },
      [item](CacheObject& self, nb::handle value) { self.set_field(item, to_state(value)); },
      nb::for_getter(nb::sig(getter.c_str())), nb::for_setter(nb::sig(setter.c_str())),
      nb::for_setter(nb::arg("value").none()));
}

// The same for an item that is a number for each row.
template <typename Class>
void def_counts(Class& type, const char* name, std::size_t item, const std::string& hint) {
  namespace nb = nanobind;
  const std::string getter = "def " + std::string(name) + "(self) -> " + hint;
  const std::string setter =
      "def " + std::string(name) + "(self, value: collections.abc.Sequence[int] | " + hint + ", /) -> None";
  type.def_prop_rw(
      name, [item](const CacheObject& self) { return to_python(self.field(item)); },
      [item, name](CacheObject& self, nb::handle value) { self.set_field(item, to_counts(value, name)); },
      nb::for_getter(nb::sig(getter.c_str())), nb::for_setter(nb::sig(setter.c_str())),
      nb::for_setter(nb::arg("value").none()));
}

// A method of the class: `function` takes the type first.
template <typename Function, typename... Extra>
void def_classmethod(nanobind::handle type, const char* name, Function&& function, const Extra&... extra) {
  namespace nb = nanobind;
  nb::object callable = nb::cpp_function(std::forward<Function>(function), nb::name(name), nb::scope(type), extra...);
  nb::setattr(type, name, nb::module_::import_("builtins").attr("classmethod")(callable));
}

// merge, for the classes that have it in mlx-lm, which makes a `batch_class`.
void def_merge(nanobind::handle type, const std::string& batch_class);

}  // namespace reprise::python
