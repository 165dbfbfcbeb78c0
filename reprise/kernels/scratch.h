// Working memory of a kernel on one thread, kept between calls. Private to `kernels`.
#pragma once

#include <cstddef>

namespace reprise::kernels::cpu {

// At least `bytes` bytes aligned to 64, this thread's own until its next call of this function. Throws: bad_alloc.
void* scratch(std::size_t bytes);

}  // namespace reprise::kernels::cpu
