// The native part of the Python package: reprise._core.
#include <nanobind/nanobind.h>

#include "python/src/bindings.h"

namespace nb = nanobind;

namespace {

// Types of C++ exist once a process. A module that is loaded again (somebody emptied sys.modules) is the one there was.
struct FirstModule {
  PyInterpreterState* interpreter = nullptr;
  PyObject* contents = nullptr;  // alive as long as the process
};
FirstModule first;

// False: nothing is there yet. Throws: ImportError in another interpreter.
bool take_first(nb::module_& m) {
  if (first.contents == nullptr) return false;
  if (first.interpreter != PyInterpreterState_Get()) {
    throw nb::import_error("reprise._core can be loaded in one interpreter of a process only");
  }
  m.attr("__dict__").attr("update")(nb::handle(first.contents));
  return true;
}

}  // namespace

NB_MODULE(_core, m) {
  if (take_first(m)) return;
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
  first = {PyInterpreterState_Get(), nb::dict(m.attr("__dict__")).release().ptr()};
}
