// The native part of the Python package: reprise._core.
#include <nanobind/nanobind.h>

#include "python/src/bindings.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "Reprise's caches. Use reprise.cache, which has these and the rest.";
  m.attr("__version__") = REPRISE_VERSION;
  // MLX's own module brings the type of arrays (they share the domain "mlx") and loads libmlx.
  nb::module_::import_("mlx.core");

  namespace python = reprise::python;
  python::bind_errors(m);
  python::bind_layer_cache(m);
  python::bind_caches(m);
  python::bind_arrays_cache(m);
  python::bind_batch_caches(m);
  python::bind_prompt_cache(m);
  python::bind_files(m);
  python::bind_masks(m);
  python::bind_attention(m);
  python::bind_token_buffer(m);
  python::bind_token_trie(m);
}
