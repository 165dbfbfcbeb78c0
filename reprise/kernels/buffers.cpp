#include "reprise/kernels/buffers.h"

#include <array>
#include <memory>
#include <new>

namespace reprise::kernels::cpu {

namespace {

constexpr std::align_val_t kAlignment{64};

struct Free {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};

struct Held {
  std::unique_ptr<void, Free> memory = {};
  std::size_t bytes = 0;
};

}  // namespace

void* buffer(Buffer which, std::size_t bytes) {
  thread_local std::array<Held, static_cast<std::size_t>(Buffer::count_)> buffers;
  Held& held = buffers[static_cast<std::size_t>(which)];
  if (held.bytes < bytes) {
    held = {};  // freed first: the two need not fit together
    held.memory.reset(::operator new(bytes, kAlignment));
    held.bytes = bytes;
  }
  return held.memory.get();
}

}  // namespace reprise::kernels::cpu
