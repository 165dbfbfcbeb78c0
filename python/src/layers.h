// Python's list of caches as a PromptCache, and back.
#pragma once

#include <nanobind/nanobind.h>

#include "reprise/cache/prompt_cache.h"

namespace reprise::python {

// Forks of the layers: functions that change them are followed by write_back, and have then all happened or none.
// Throws: TypeError for a layer that is none of ours.
PromptCache fork_layers(nanobind::handle caches);
// Puts layers that came from fork_layers back into the objects of `caches`, which keep their identity. Where the class
// is another one now, the list gets a new object. Requires: the same number of layers.
void write_back(nanobind::handle caches, PromptCache layers);
// A list of new Python objects.
nanobind::list wrap_layers(PromptCache layers);

}  // namespace reprise::python
