#include "reprise/kernels/scratch.h"

#include "reprise/kernels/buffers.h"

namespace reprise::kernels::cpu {

void* scratch(std::size_t bytes) { return buffer(Buffer::product, bytes); }

}  // namespace reprise::kernels::cpu
