#include "reprise/cache/dynamic_roll.h"

#include <sstream>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

mx::array dynamic_roll(const mx::array& x, const mx::array& shifts, int axis) {
  const int rank = static_cast<int>(x.ndim());
  if (axis < 1 || axis >= rank) {
    throw Error(ErrorCode::invalid_argument, "[dynamic_roll] axis must lie in [1, " + std::to_string(rank - 1) +
                                                 "], but got " + std::to_string(axis));
  }
  const int rows = x.shape(0);
  const bool one_for_all = shifts.size() == 1 && shifts.ndim() <= 2;
  const bool per_row = (shifts.ndim() == 1 && shifts.shape(0) == rows) ||
                       (shifts.ndim() == 2 && shifts.shape(0) == rows && shifts.shape(1) == 1);
  if (shifts.dtype() != mx::int32 || (!one_for_all && !per_row)) {
    std::ostringstream got;
    got << shifts.dtype() << " " << shifts.shape();
    throw Error(ErrorCode::invalid_argument, "[dynamic_roll] shifts must be int32 and broadcastable to [" +
                                                 std::to_string(rows) + ", 1], but got " + got.str());
  }
  const int length = x.shape(axis);
  if (x.size() == 0) return x;

  const mx::array columns = mx::arange(0, length, mx::int32);
  // remainder takes the divisor's sign, so negative shifts come out right; taken first, no difference overflows.
  const mx::array distances = mx::remainder(mx::reshape(shifts, {-1, 1}), mx::array(length));
  const mx::array from = mx::remainder(mx::subtract(columns, distances), mx::array(length));
  mx::Shape shape(x.ndim(), 1);
  shape[0] = from.shape(0);
  shape[static_cast<std::size_t>(axis)] = length;
  mx::Shape full = x.shape();
  return mx::take_along_axis(x, mx::broadcast_to(mx::reshape(from, std::move(shape)), std::move(full)), axis);
}

}  // namespace reprise
