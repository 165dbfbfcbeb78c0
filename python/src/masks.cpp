// Masks that no cache makes, and the rolling of rows, under mlx-lm's names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "mlx/array.h"
#include "python/src/bindings.h"
#include "python/src/conversions.h"
#include "reprise/cache/dynamic_roll.h"
#include "reprise/nn/masks.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace reprise::python {

void bind_masks(nb::module_& m) {
  m.def(
      "create_causal_mask",
      [](int N, int offset, std::optional<int> window_size, std::optional<mx::array> right_padding,
         std::optional<mx::array> left_padding) {
        return create_causal_mask(N, offset,
                                  {.window = window_size,
                                   .right_padding = std::move(right_padding),
                                   .left_padding = std::move(left_padding)});
      },
      "N"_a, "offset"_a = 0, "window_size"_a = nb::none(), "right_padding"_a = nb::none(),
      "left_padding"_a = nb::none(),
      "Query i of N sits at offset + i. Returns bool [N, offset + N], true = may attend, or [B, 1, N, offset + N] with "
      "any padding (int32 [B]). Raises ValueError for N < 1, offset < 0 or window_size < 1.");
  m.def(
      "create_attention_mask",
      [](int N, int offset, bool return_array, std::optional<int> window_size) {
        return to_python(create_attention_mask(N, offset, {.return_array = return_array, .window = window_size}));
      },
      "N"_a, "offset"_a, "return_array"_a, "window_size"_a.none(),
      nb::sig("def create_attention_mask(N: int, offset: int, return_array: bool, window_size: int | None) -> "
              "mlx.core.array | str | None"),
      "The mask for N new tokens after `offset` stored ones.");
  m.def("dynamic_roll", &dynamic_roll, "x"_a, "shifts"_a, "axis"_a,
        "Rolls each row of x right along the axis by its own shift: int32 [B] or [B, 1].");
}

}  // namespace reprise::python
