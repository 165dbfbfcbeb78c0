// The bytes of an array in row-major order, where they lie.
// Threads: free functions; the array may be another thread's, since it is evaluated.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "mlx/array.h"

namespace reprise {

// Calls use(bytes) for each run of bytes that lie together; the runs one after the other are the row-major array.
// Nothing is copied: a cut out of a larger buffer is a few long runs, a transposed matrix as many as it has items.
// Requires: the array is evaluated.
void for_each_run(const mlx::core::array& array, const std::function<void(std::span<const std::byte>)>& use);

// The array, evaluated; copied to row-major order where its runs are shorter than 64 KiB.
mlx::core::array with_long_runs(const mlx::core::array& array);

}  // namespace reprise
