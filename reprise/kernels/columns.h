// What an array [B, L, size] holds, as kernels take columns of sequences. Private to `kernels`.
#pragma once

#include "mlx/array.h"
#include "reprise/kernels/columns_view.h"
#include "reprise/kernels/flat_array.h"

namespace reprise::kernels::internal {

// Made and asked as a FlatArray; copied only where features do not lie beside each other.
class Columns {
 public:
  explicit Columns(const mlx::core::array& array)
      : flat_(array),
        view_{array.data<float>(), array.strides(0), array.strides(1)},
        is_strided_(array.shape(2) == 1 || array.strides(2) == 1),
        length_(array.shape(1)),
        size_(array.shape(2)) {}

  cpu::ColumnsView view() {
    if (is_strided_) return view_;
    return {flat_.get(), static_cast<std::ptrdiff_t>(length_) * size_, size_};
  }

 private:
  FlatArray<float> flat_;
  cpu::ColumnsView view_;
  bool is_strided_;
  int length_;
  int size_;
};

}  // namespace reprise::kernels::internal
