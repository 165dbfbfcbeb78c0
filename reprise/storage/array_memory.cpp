#include "reprise/storage/array_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "mlx/allocator.h"
#include "mlx/device.h"
#include "reprise/base/error.h"

namespace reprise::internal {
namespace mx = mlx::core;
// MLX's CPU allocator hands out buffers whose data starts a fixed way after the buffer's own address, and never looks
// at a buffer that it does not own. So a buffer over foreign memory is made by taking that way back. GPU allocators
// keep handles instead.
bool can_view_memory() {
  static const bool plain = [] {
    if (mx::is_available(mx::Device::gpu)) return false;
    for (const std::size_t size : {std::size_t{64}, std::size_t{100'000}}) {
      const mx::allocator::Data probe = mx::allocator::malloc(size);
      mx::allocator::Buffer buffer = probe.buffer();
      if (static_cast<char*>(buffer.raw_ptr()) - static_cast<char*>(buffer.ptr()) != sizeof(std::size_t)) return false;
    }
    return true;
  }();
  return plain;
}

std::shared_ptr<MemoryBlock> MemoryBlock::allocate(std::size_t size_bytes) {
  constexpr std::size_t kLargePage = std::size_t{2} << 20U;
  const std::size_t mapped = size_bytes + kLargePage;  // room to begin at a large page
  void* mapping = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw Error(ErrorCode::resource_exhausted, "[storage] no memory for " + std::to_string(size_bytes) + " bytes");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  auto* begin = static_cast<std::byte*>(mapping) + ((kLargePage - address % kLargePage) % kLargePage);
#ifdef MADV_HUGEPAGE
  ::madvise(begin, size_bytes, MADV_HUGEPAGE);  // a wish
#endif
  return std::shared_ptr<MemoryBlock>(new MemoryBlock(mapping, mapped, begin));
}

MemoryBlock::~MemoryBlock() { ::munmap(mapping_, mapped_bytes_); }

mx::array allocate_array(mx::Shape shape, mx::Dtype dtype) {
  std::size_t size_bytes = dtype.size();
  for (const auto dim : shape) size_bytes *= static_cast<std::size_t>(dim);
  mx::allocator::Data data = mx::allocator::malloc(size_bytes);
  if (data.buffer().ptr() == nullptr) {
    throw Error(ErrorCode::resource_exhausted, "[storage] no memory for " + std::to_string(size_bytes) + " bytes");
  }
  return mx::array(std::move(data), std::move(shape), dtype);
}

mx::array view_memory(std::byte* data, mx::Shape shape, mx::Dtype dtype, std::shared_ptr<const void> owner) {
  if (!can_view_memory()) {
    return mx::array(data, std::move(shape), dtype, [owner = std::move(owner)](void*) {});
  }
  mx::allocator::Data view(mx::allocator::Buffer(data - sizeof(std::size_t)),
                           [owner = std::move(owner)](mx::allocator::Buffer) {});
  return mx::array(std::move(view), std::move(shape), dtype);
}

mx::array copy_memory(const std::byte* data, mx::Shape shape, mx::Dtype dtype) {
  mx::array result = allocate_array(std::move(shape), dtype);
  if (result.nbytes() > 0) std::memcpy(result.data<char>(), data, result.nbytes());
  return result;
}

}  // namespace reprise::internal
