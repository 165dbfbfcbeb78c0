// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include "mlx/array.h"

namespace reprise {

// Rolls each row of `x` [B, …] right along `axis` by its own shift, modulo the axis' length; negative shifts roll left.
// `shifts`: int32, broadcastable to [B, 1]; [B] is taken too. Returns: x's shape and dtype.
// Throws: invalid_argument for an axis that is not there (or 0, the rows') or shifts of another shape.
mlx::core::array dynamic_roll(const mlx::core::array& x, const mlx::core::array& shifts, int axis);

}  // namespace reprise
