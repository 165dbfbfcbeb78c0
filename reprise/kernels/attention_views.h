// Arrays as attention's kernels see them. Private to `kernels`.
#pragma once

#include "mlx/array.h"
#include "reprise/kernels/attention_cpu.h"

namespace reprise::kernels::internal {

// An evaluated mask, bool or of an element type, that is broadcastable to [B, H, L, S].
cpu::MaskView mask_view(const mlx::core::array& mask);

}  // namespace reprise::kernels::internal
