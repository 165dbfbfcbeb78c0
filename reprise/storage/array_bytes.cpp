#include "reprise/storage/array_bytes.h"

#include <algorithm>
#include <cstdint>

#include "mlx/ops.h"

namespace reprise {

namespace {

struct Run {
  std::size_t outer;   // axes before those that are the run
  std::int64_t items;  // of one
};

// The last axes, as far as they lie together, are a run.
Run run_of(const mlx::core::array& array) {
  Run run{array.ndim(), 1};
  for (; run.outer > 0; --run.outer) {
    const auto extent = array.shape()[run.outer - 1];
    if (extent != 1 && array.strides()[run.outer - 1] != run.items) break;
    run.items *= extent;
  }
  return run;
}

}  // namespace

void for_each_run(const mlx::core::array& array, const std::function<void(std::span<const std::byte>)>& use) {
  if (array.size() == 0) return;
  const auto* data = reinterpret_cast<const std::byte*>(array.data<char>());
  const auto& shape = array.shape();
  const auto& strides = array.strides();
  const auto [outer, run] = run_of(array);
  std::int64_t num_runs = 1;
  for (std::size_t axis = 0; axis < outer; ++axis) num_runs *= shape[axis];
  const auto item = static_cast<std::int64_t>(array.itemsize());
  for (std::int64_t i = 0; i < num_runs; ++i) {
    std::int64_t offset = 0;
    std::int64_t rest = i;
    for (std::size_t axis = outer; axis-- > 0;) {
      offset += rest % shape[axis] * strides[axis];
      rest /= shape[axis];
    }
    use({data + offset * item, static_cast<std::size_t>(run * item)});
  }
}

mlx::core::array with_long_runs(const mlx::core::array& array) {
  constexpr std::size_t kShortRun = std::size_t{64} << 10U;
  mlx::core::array result = array;
  result.eval();
  const std::size_t run_bytes = static_cast<std::size_t>(run_of(result).items) * result.itemsize();
  if (run_bytes >= std::min(result.nbytes(), kShortRun)) return result;
  result = mlx::core::contiguous(array);
  result.eval();
  return result;
}

}  // namespace reprise
