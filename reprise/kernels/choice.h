// Which of its two versions an operation takes. Private to `kernels`.
#pragma once

namespace reprise::kernels::internal {

// This room's kernels: arrays live on the CPU, and no ReferenceScope is open. Otherwise MLX's operations.
bool use_kernels();

}  // namespace reprise::kernels::internal
