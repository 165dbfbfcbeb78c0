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

// Whether view_memory takes any memory as it is: MLX's arrays lie in plain memory.
bool can_view_memory();

// One block for many arrays, in large pages where the system has them: fewer faults while it is filled, fewer misses
// when it is read. Zeroed and aligned to 64 bytes. Throws: resource_exhausted.
class MemoryBlock {
 public:
  static std::shared_ptr<MemoryBlock> allocate(std::size_t size_bytes);
  ~MemoryBlock();
  MemoryBlock(const MemoryBlock&) = delete;
  MemoryBlock& operator=(const MemoryBlock&) = delete;

  std::byte* data() const { return data_; }

 private:
  MemoryBlock(void* mapping, std::size_t mapped_bytes, std::byte* data)
      : mapping_(mapping), mapped_bytes_(mapped_bytes), data_(data) {}

  void* mapping_;
  std::size_t mapped_bytes_;
  std::byte* data_;
};

// A copy of `data`.
mlx::core::array copy_memory(const std::byte* data, mlx::core::Shape shape, mlx::core::Dtype dtype);

}  // namespace reprise::internal
