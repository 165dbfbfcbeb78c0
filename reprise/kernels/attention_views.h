// Arrays as attention's kernels see them. Private to `kernels`.
#pragma once

#include "mlx/array.h"
#include "reprise/kernels/attention_cpu.h"
#include "reprise/kernels/store_cpu.h"

namespace reprise::kernels::internal {

// An evaluated mask, bool or of an element type, that is broadcastable to [B, H, L, S].
cpu::MaskView mask_view(const mlx::core::array& mask);

// An array [B, L, features] of an element type whose memory is there.
cpu::ProjectedRows projected(const mlx::core::array& x);

}  // namespace reprise::kernels::internal
