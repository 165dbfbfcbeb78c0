// The parts of the Python module `reprise._core`, one function a file.
// Threads: everything here runs with Python's global lock held.
#pragma once

#include <nanobind/nanobind.h>

namespace reprise::python {

void bind_attention(nanobind::module_& m);
void bind_batch_caches(nanobind::module_& m);
void bind_arrays_cache(nanobind::module_& m);
void bind_caches(nanobind::module_& m);
void bind_errors(nanobind::module_& m);
void bind_files(nanobind::module_& m);
void bind_layer_cache(nanobind::module_& m);
void bind_masks(nanobind::module_& m);
void bind_prompt_cache(nanobind::module_& m);
void bind_token_buffer(nanobind::module_& m);
void bind_token_trie(nanobind::module_& m);

}  // namespace reprise::python
