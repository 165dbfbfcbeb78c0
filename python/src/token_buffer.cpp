// mlx-lm's TokenBuffer on ours.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "mlx/array.h"
#include "python/src/bindings.h"
#include "python/src/conversions.h"
#include "reprise/base/tokens.h"
#include "reprise/cache/token_buffer.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace reprise::python {

namespace {

mx::array append(TokenBuffer& buffer, nb::handle tokens) {
  if (nb::isinstance<mx::array>(tokens)) return buffer.update_and_fetch(nb::cast<mx::array>(tokens));
  return buffer.update_and_fetch(Tokens(to_ints(tokens, "tokens")));
}

}  // namespace

void bind_token_buffer(nb::module_& m) {
  nb::class_<TokenBuffer> type(m, "TokenBuffer", nb::dynamic_attr(), nb::is_weak_referenceable(),
                               "The ids of a growing sequence as one int32 array, with room for more in steps of 256. "
                               "Arrays that it hands out are values.");
  type.def(
          "__init__",
          [](TokenBuffer* self, nb::handle tokens) {
            new (self) TokenBuffer();
            if (tokens.is_none()) return;
            try {
              append(*self, tokens);
            } catch (...) {
              self->~TokenBuffer();
              throw;
            }
          },
          "tokens"_a = nb::none(), nb::sig("def __init__(self, tokens: list[int] | mlx.core.array | None = None)"))
      .def("update_and_fetch", &append, "tokens"_a,
           "Appends integers [n]. Returns all tokens so far, int32 [size]. Raises ValueError for an array of another "
           "rank or dtype.",
           nb::sig("def update_and_fetch(self, tokens: list[int] | mlx.core.array) -> mlx.core.array"))
      .def_prop_ro(
          "state", [](const TokenBuffer& self) { return self.state(); }, "The whole buffer, int32 [capacity].")
      .def_prop_ro(
          "tokens", [](const TokenBuffer& self) { return self.tokens(); }, "int32 [size].")
      .def("__copy__", [](const TokenBuffer& self) { return TokenBuffer(self); })
      .def(
          "__deepcopy__", [](const TokenBuffer& self, nb::handle) { return TokenBuffer(self); }, "memo"_a);
  type.attr("step") = TokenBuffer::kStep;
}

}  // namespace reprise::python
