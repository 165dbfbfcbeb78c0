#include "python/src/batch_methods.h"

#include <algorithm>
#include <string>

#include "python/src/conversions.h"

namespace nb = nanobind;

namespace reprise::python {

namespace {

// Python counts rows from the end too.
int row_of(const BatchedCache& batch, int row) { return row < 0 ? row + batch.batch_size() : row; }

}  // namespace

void filter_rows(CacheObject& self, nb::handle batch_indices) {
  std::vector<int> rows = to_ints(batch_indices, "batch_indices");
  BatchedCache& batch = self.batch();
  for (int& row : rows) row = row_of(batch, row);
  batch.filter(rows);
}

void extend_rows(CacheObject& self, CacheObject& other) {
  if (&self == &other) {
    const std::unique_ptr<LayerCache> copy = other.cache().fork();
    self.batch().extend(*copy);
  } else {
    const LayerCache& rows = other.cache();
    self.batch().extend(rows);
  }
}

nb::object extract_row(CacheObject& self, int idx) {
  BatchedCache& batch = self.batch();
  return wrap(batch.extract(row_of(batch, idx)));
}

void prepare(CacheObject& self, nb::handle left_padding, nb::handle lengths, nb::handle right_padding) {
  BatchPrompt prompt{.left_padding = to_ints_or_none(left_padding, "left_padding"),
                     .lengths = to_ints_or_none(lengths, "lengths"),
                     .right_padding = to_ints_or_none(right_padding, "right_padding")};
  // Nothing to announce: mlx-lm then asks for no lengths either.
  const auto positive = [](int columns) { return columns > 0; };
  const auto& columns = prompt.right_padding;
  if (!columns.empty() && std::none_of(columns.begin(), columns.end(), positive)) prompt.lengths.clear();
  self.batch().prepare(prompt);
}

}  // namespace reprise::python
