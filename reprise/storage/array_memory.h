// MLX arrays over memory that this room fills or maps. Private to storage.
// Threads: free functions; the arrays are leaves, always evaluated.
#pragma once

#include <cstddef>
#include <memory>

#include "mlx/array.h"

namespace reprise::internal {

// An array whose bytes the caller fills through data<char>() before anyone else sees it.
// Throws: resource_exhausted.
mlx::core::array allocate_array(mlx::core::Shape shape, mlx::core::Dtype dtype);

// An array that looks at `data`, aligned to the item, and keeps `owner` alive; where MLX's allocator cannot take
// foreign memory (CUDA; Metal off a page boundary) a copy.
// Requires: the 8 bytes before `data` are readable (MLX's CPU allocator keeps a block's size there).
mlx::core::array view_memory(std::byte* data, mlx::core::Shape shape, mlx::core::Dtype dtype,
                             std::shared_ptr<const void> owner);

// A copy of `data`.
mlx::core::array copy_memory(const std::byte* data, mlx::core::Shape shape, mlx::core::Dtype dtype);

}  // namespace reprise::internal
