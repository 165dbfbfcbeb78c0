#include "reprise/kernels/scratch.h"

#include <algorithm>
#include <memory>
#include <new>

namespace reprise::kernels::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Free {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};

}  // namespace

void* scratch(std::size_t bytes) {
  thread_local std::unique_ptr<void, Free> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    const std::size_t more = std::max(bytes, 2 * size);
    memory.reset();
    size = 0;
    memory.reset(::operator new(more, kAlignment));
    size = more;
  }
  return memory.get();
}

}  // namespace reprise::kernels::cpu
