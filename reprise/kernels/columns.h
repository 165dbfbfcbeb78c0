// What an array of one evaluation holds, for operations over the columns of sequences. Private to `kernels`.
// Threads: one object belongs to one evaluation. The array's numbers are read by the methods alone: they are computed
// only by the time that the operation runs.
#pragma once

#include <cstdint>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/columns_view.h"

namespace reprise::kernels::internal {

template <typename Number>
class Columns {
 public:
  // Requires: an array of such numbers, evaluated but for its task, that lives as long as this.
  explicit Columns(const mlx::core::array& array)
      : data_(array.data<Number>()),
        shape_(array.shape()),
        strides_(array.strides()),
        is_flat_(array.flags().row_contiguous) {}

  // Of [B, L, size], features beside each other: copied if they are not. Requires: float.
  cpu::ColumnsView view() {
    if (shape_[2] > 1 && strides_[2] != 1) make_flat();
    return {data_, strides_[0], strides_[1]};
  }

  // All of it, row after row.
  const Number* flat() {
    if (!is_flat_) make_flat();
    return data_;
  }

 private:
  void make_flat() {
    std::vector<int> index(shape_.size(), 0);
    std::size_t size = 1;
    for (const int extent : shape_) size *= static_cast<std::size_t>(extent);
    copy_.resize(size);
    for (Number& number : copy_) {
      std::int64_t at = 0;
      for (std::size_t axis = 0; axis < shape_.size(); ++axis) at += index[axis] * strides_[axis];
      number = data_[at];
      for (std::size_t axis = shape_.size(); axis-- > 0;) {
        if (++index[axis] < shape_[axis]) break;
        index[axis] = 0;
      }
    }
    data_ = copy_.data();
    std::int64_t stride = 1;
    for (std::size_t axis = shape_.size(); axis-- > 0; stride *= shape_[axis]) strides_[axis] = stride;
    is_flat_ = true;
  }

  const Number* data_;
  mlx::core::Shape shape_;
  mlx::core::Strides strides_;
  bool is_flat_;
  std::vector<Number> copy_;
};

}  // namespace reprise::kernels::internal
