// Memory for the time of one operation, kept by each thread for the next. Private to `kernels`.
// Threads: every thread has its own.
#pragma once

#include <cstddef>

namespace reprise::kernels::cpu {

// Who uses it: one operation holds several at once.
enum class Buffer { input, residual, output, normed, prepared, hidden, gate, up, experts, product, count_ };

// At least `bytes`, aligned to 64; what was in it is undefined. Valid until this thread asks for the same one again.
// Throws: bad_alloc.
void* buffer(Buffer which, std::size_t bytes);

inline float* float_buffer(Buffer which, std::size_t count) {
  return static_cast<float*>(buffer(which, count * sizeof(float)));
}

}  // namespace reprise::kernels::cpu
