// The functions over the caches of all layers, and points to go back to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "python/src/bindings.h"
#include "python/src/cache_class.h"
#include "python/src/layers.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/snapshots.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace reprise::python {

namespace {

void bind_snapshots(nb::module_& m) {
  nb::class_<Snapshots>(
      m, "Snapshots",
      "Points of one live prompt cache that it can go back to although some of its layers cannot trim. "
      "Every call is given the same list of caches.")
      .def(
          "__init__",
          [](Snapshots* self, std::size_t max_count, std::optional<std::size_t> max_bytes) {
            SnapshotLimits limits{.max_count = max_count};
            if (max_bytes) limits.max_bytes = *max_bytes;
            new (self) Snapshots(limits);
          },
          "max_count"_a = 8, "max_bytes"_a = nb::none())
      .def(
          "take",
          [](Snapshots& self, nb::handle cache, std::optional<int> position) {
            const PromptCache layers = fork_layers(cache);
            return position ? self.take(layers, *position) : self.take(layers);
          },
          "cache"_a, "position"_a = nb::none(),
          "Remembers where the cache stands; `position` for caches in which no layer knows it. Returns False when "
          "nothing had to be kept, or when it alone exceeds the limits.")
      .def(
          "rewind",
          [](Snapshots& self, nb::handle cache, int to) {
            PromptCache layers = fork_layers(cache);
            const std::optional<int> reached = self.rewind(layers, to);
            if (reached) write_back(cache, std::move(layers));
            return reached;
          },
          "cache"_a, "to"_a,
          "Takes the cache back to position `to`, or to the newest snapshot before it. Returns the position reached, "
          "from which the caller feeds again, or None, and nothing has changed, when no way leads there.")
      .def("forget_after", &Snapshots::forget_after, "position"_a)
      .def("clear", &Snapshots::clear)
      .def("fork", &Snapshots::fork, "The same points for a fork of the live cache.")
      .def_prop_ro("positions", &Snapshots::positions)
      .def_prop_ro("nbytes", &Snapshots::nbytes);
}

}  // namespace

void bind_prompt_cache(nb::module_& m) {
  m.def(
      "is_native",
      [](nb::handle caches) {
        for (nb::handle cache : nb::iter(caches)) {
          if (!is_native(cache)) return false;
        }
        return true;
      },
      "cache"_a, "Every layer is a native cache, or a CacheList of such.");
  m.def(
      "check_prompt_cache",
      [](nb::handle cache, std::optional<int> expected) { check_prompt_cache(fork_layers(cache), expected); },
      "cache"_a, "expected"_a = nb::none());
  m.def("merge_caches", &merged, "caches"_a,
        "A batch of these caches, one row each, of the batch class that they have; they stay as they are.");
  m.def(
      "to_quantized",
      [](nb::handle cache, int group_size, int bits) { return wrap(fork_of(cache)->to_quantized(group_size, bits)); },
      "cache"_a, "group_size"_a = 64, "bits"_a = 4, "A new cache of the quantised class with the same rows.");
  m.def(
      "to_dequantized", [](nb::handle cache) { return wrap(fork_of(cache)->to_dequantized()); }, "cache"_a,
      "The other way: the class of the same name without \"Quantized\".");
  bind_snapshots(m);
}

}  // namespace reprise::python
