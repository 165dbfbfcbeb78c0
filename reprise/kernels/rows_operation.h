// An operation of the CPU over rows of features as one of MLX's. Private to `kernels`.
// Threads: results are unevaluated arrays of the calling thread; run is called from MLX's.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "mlx/array.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/linear_cpu.h"

namespace reprise::kernels::internal {

class RowsOperation {
 public:
  virtual ~RowsOperation() = default;
  virtual const char* name() const = 0;  // a literal, which profiles show
  // Each output [x.rows, its size]. residual: null, or [x.rows, size] of the first output.
  virtual void run(const cpu::Rows& x, const float* residual, std::span<float* const> outputs,
                   ThreadPool& pool) const = 0;
};

// x [..., in] and residual [..., sizes[0]] of float32, float16 or bfloat16, in any layout. Returns: [..., sizes[i]]
// each, in x's dtype. Requires: at least one row.
std::vector<mlx::core::array> apply(std::shared_ptr<const RowsOperation> operation, const mlx::core::array& x,
                                    const std::optional<mlx::core::array>& residual, const std::vector<int>& sizes);

}  // namespace reprise::kernels::internal
