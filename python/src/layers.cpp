#include "python/src/layers.h"

#include <nanobind/stl/string.h>

#include <string>

#include "python/src/cache_class.h"
#include "reprise/cache/cache_list.h"

namespace nb = nanobind;

namespace reprise::python {

namespace {

// Puts the contents of `from` into `object`, children of a CacheList included. Returns: false, and nothing has changed
// at this level, when its class is another.
bool put(nb::handle object, const LayerCache& from) {
  if (nb::isinstance<CacheObject>(object)) {
    CacheObject& to = object_of(object);
    if (to.stored().class_name() != from.class_name()) return false;
    to.assign(from.fork());
    return true;
  }
  const auto* list = dynamic_cast<const CacheList*>(&from);
  if (!list) return false;
  nb::list children(object.attr("caches"));
  bool replaced = false;
  for (std::size_t i = 0; i < list->num_children(); ++i) {
    if (put(children[i], list->child(i))) continue;
    children[i] = wrap(list->child(i).fork());
    replaced = true;
  }
  if (replaced) object.attr("caches") = nb::tuple(children);
  return true;
}

}  // namespace

PromptCache fork_layers(nb::handle caches) {
  PromptCache layers;
  for (nb::handle cache : nb::iter(caches)) layers.push_back(fork_of(cache));
  return layers;
}

void write_back(nb::handle caches, PromptCache layers) {
  nb::object list = nb::borrow(caches);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const nb::object layer = list[i];
    if (!put(layer, layers[i])) list[i] = wrap(layers[i].fork());
  }
}

nb::list wrap_layers(PromptCache layers) {
  nb::list caches;
  for (std::size_t i = 0; i < layers.size(); ++i) caches.append(wrap(layers[i].fork()));
  return caches;
}

}  // namespace reprise::python
