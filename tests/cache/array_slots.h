// Slots of an ArraysCache whose rows carry numbers, so that a test can read back which rows they are.
// Threads: free functions.
#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/arrays_cache.h"

namespace reprise::cache_test {

using Counts = std::optional<std::vector<int>>;

// [rows.size(), 2, 3], filled with each row's number.
mlx::core::array slot(const std::vector<int>& rows, mlx::core::Dtype dtype = mlx::core::float32);

// The numbers of a slot's rows; none when unset. Fails the test when a row holds others besides.
Counts rows_in(const ArraysCache& cache, int index);

// make_mask(N), row by row. Requires: there is one.
std::vector<std::vector<bool>> mask_of(const ArraysCache& cache, int N);

}  // namespace reprise::cache_test
