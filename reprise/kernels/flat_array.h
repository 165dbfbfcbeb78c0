// An array's numbers end to end, as kernels take them. Private to `kernels`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mlx/array.h"

namespace reprise::kernels::internal {

// Made of an array whose memory is there, while what it holds may still be computed; asked when it has been.
template <typename Number>
class FlatArray {
 public:
  explicit FlatArray(const mlx::core::array& array) : data_(array.data<Number>()) {
    if (array.flags().row_contiguous) return;
    shape_ = array.shape();
    strides_ = array.strides();
    copy_.resize(array.size());
  }

  const Number* get() {
    if (copy_.empty()) return data_;
    std::vector<int> index(shape_.size(), 0);
    for (Number& number : copy_) {
      std::int64_t at = 0;
      for (std::size_t axis = 0; axis < shape_.size(); ++axis) at += index[axis] * strides_[axis];
      number = data_[at];
      for (std::size_t axis = shape_.size(); axis-- > 0;) {
        if (++index[axis] < shape_[axis]) break;
        index[axis] = 0;
      }
    }
    return copy_.data();
  }

 private:
  const Number* data_;
  mlx::core::Shape shape_;
  mlx::core::Strides strides_;
  std::vector<Number> copy_;  // empty: numbers lie end to end already
};

}  // namespace reprise::kernels::internal
