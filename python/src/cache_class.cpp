#include "python/src/cache_class.h"

#include <nanobind/stl/string.h>

#include <map>

#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"

namespace nb = nanobind;

namespace reprise::python {

namespace {

struct PythonClass {
  nb::handle type;  // lives as long as the module
  Construct construct;
};

std::map<std::string, PythonClass>& classes() {
  static std::map<std::string, PythonClass> all;
  return all;
}

const PythonClass& class_of(const LayerCache& cache) { return classes().at(cache.class_name()); }

// Lists of caches that hold themselves, or too many of each other, end in RecursionError.
class Descent {
 public:
  Descent() {
    if (Py_EnterRecursiveCall(" in a list of caches") != 0) nb::raise_python_error();
  }
  ~Descent() { Py_LeaveRecursiveCall(); }
  Descent(const Descent&) = delete;
  Descent& operator=(const Descent&) = delete;
};

// With its module: mlx-lm's classes have the names of ours.
std::string class_name(nb::handle object) {
  const nb::handle type = object.type();
  return nb::cast<std::string>(nb::str(type.attr("__module__"))) + "." +
         nb::cast<std::string>(nb::str(type.attr("__qualname__")));
}

nb::object cache_list_type() { return nb::module_::import_("reprise._cache_list").attr("CacheList"); }

}  // namespace

void register_class(const std::string& class_name, nb::handle type, Construct construct) {
  classes()[class_name] = {type, construct};
}

nb::handle native_type(nb::handle type) { return classes().at(nb::cast<std::string>(type.attr("_class_name"))).type; }

nb::handle class_type(const LayerCache& cache) { return class_of(cache).type; }

nb::object wrap(std::unique_ptr<LayerCache> cache) {
  if (auto* list = dynamic_cast<CacheList*>(cache.get())) {
    nb::list children;
    for (std::size_t i = 0; i < list->num_children(); ++i) children.append(wrap(list->child(i).fork()));
    return cache_list_type()(*nb::tuple(children));
  }
  const nb::handle type = class_of(*cache).type;
  return wrap_as(type, std::move(cache));
}

nb::object wrap_as(nb::handle type, std::unique_ptr<LayerCache> cache) {
  const PythonClass& of = class_of(*cache);
  if (PyObject_IsSubclass(type.ptr(), of.type.ptr()) != 1) {
    throw nb::type_error(("the type must be one of the class " + cache->class_name()).c_str());
  }
  nb::object object = nb::inst_alloc(type);
  of.construct(object, std::move(cache));
  return object;
}

void set_contents(nb::handle object, std::unique_ptr<LayerCache> cache) {
  const PythonClass& of = class_of(*cache);
  if (!nb::isinstance(object, of.type)) {
    throw nb::type_error(("the object must be one of the class " + cache->class_name()).c_str());
  }
  if (nb::inst_ready(object)) {
    object_of(object).assign(std::move(cache));
  } else {
    of.construct(object, std::move(cache));
  }
}

CacheObject& object_of(nb::handle object) {
  if (!nb::isinstance<CacheObject>(object) || !nb::inst_ready(object)) {
    throw nb::type_error(("a cache whose __init__ has run is needed, but got a " + class_name(object)).c_str());
  }
  return nb::cast<CacheObject&>(object);
}

std::unique_ptr<LayerCache> fork_of(nb::handle object) {
  if (nb::isinstance<CacheObject>(object)) return object_of(object).cache().fork();
  if (nb::isinstance(object, cache_list_type())) {
    const Descent descent;
    CacheList::Children children;
    for (nb::handle child : nb::iter(object.attr("caches"))) children.push_back(fork_of(child));
    return std::make_unique<CacheList>(std::move(children));
  }
  throw nb::type_error(("a layer must be one of reprise.cache's caches, but got " + class_name(object)).c_str());
}

bool is_native(nb::handle object) {
  if (nb::isinstance<CacheObject>(object)) return true;
  if (!nb::isinstance(object, cache_list_type())) return false;
  const Descent descent;
  for (nb::handle child : nb::iter(object.attr("caches"))) {
    if (!is_native(child)) return false;
  }
  return true;
}

nb::object merged(nb::handle caches) {
  const nb::tuple held = nb::tuple(caches);  // an iterator's caches live no longer than its step
  std::vector<const LayerCache*> layers;
  for (nb::handle cache : held) {
    if (!nb::isinstance<CacheObject>(cache)) {
      throw nb::type_error(("what is merged must be reprise.cache's caches, but got " + class_name(cache)).c_str());
    }
    layers.push_back(&object_of(cache).cache());
  }
  return wrap(merge_caches(layers));
}

void def_merge(nb::handle type, const std::string& batch_class) {
  const std::string signature = "def merge(cls, caches: collections.abc.Iterable[LayerCache]) -> " + batch_class;
  def_classmethod(
      type, "merge", [](nb::handle, nb::handle caches) { return merged(caches); }, nb::arg("cls"), nb::arg("caches"),
      nb::sig(signature.c_str()),
      "A batch of these caches, one row each, of the batch class that they have; they stay as they are.");
}

}  // namespace reprise::python
