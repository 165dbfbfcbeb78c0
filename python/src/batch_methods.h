// The methods of caches of several sequences, as mlx-lm's classes spell them.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "python/src/cache_class.h"

namespace reprise::python {

void filter_rows(CacheObject& self, nanobind::handle batch_indices);
void extend_rows(CacheObject& self, CacheObject& other);
nanobind::object extract_row(CacheObject& self, int idx);
void prepare(CacheObject& self, nanobind::handle left_padding, nanobind::handle lengths,
             nanobind::handle right_padding);

// filter, extend, extract, finalize.
template <typename Class>
void def_rows(Class& type, const std::string& single_class) {
  namespace nb = nanobind;
  const std::string extract = "def extract(self, idx: int) -> " + single_class;
  type.def("filter", &filter_rows, nb::arg("batch_indices"),
           nb::sig("def filter(self, batch_indices: collections.abc.Sequence[int] | mlx.core.array) -> None"),
           "Keeps these rows, in this order.");
  type.def("extend", &extend_rows, nb::arg("other"), "Appends the rows of another batch, which stays as it is.");
  type.def("extract", &extract_row, nb::arg("idx"), nb::sig(extract.c_str()), "One row as a cache of its own.");
  type.def(
      "finalize", [](CacheObject& self) { self.batch().finalize(); }, "The padded prompt is over.");
}

// prepare, for classes that store keys and values.
template <typename Class>
void def_prepare(Class& type) {
  namespace nb = nanobind;
  type.def(
      "prepare", &prepare, nb::kw_only(), nb::arg("left_padding").none() = nb::none(),
      nb::arg("lengths").none() = nb::none(), nb::arg("right_padding").none() = nb::none(),
      nb::sig("def prepare(self, *, left_padding: collections.abc.Sequence[int] | mlx.core.array | None = None, "
              "lengths: collections.abc.Sequence[int] | mlx.core.array | None = None, "
              "right_padding: collections.abc.Sequence[int] | mlx.core.array | None = None) -> None"),
      "Announces a padded prompt, before its updates: columns before and after each row's tokens, and their number.");
}

}  // namespace reprise::python
