#include "reprise/kernels/attention_views.h"

#include "reprise/kernels/weight_view.h"

namespace reprise::kernels::internal {

namespace mx = mlx::core;

cpu::MaskView mask_view(const mx::array& mask) {
  const int missing = 4 - static_cast<int>(mask.ndim());
  const auto stride = [&](int axis) -> std::ptrdiff_t {
    const int own = axis - missing;
    return own < 0 || mask.shape(own) == 1 ? 0 : mask.strides(own);
  };
  const bool is_bool = mask.dtype() == mx::bool_;
  return {is_bool ? cpu::MaskKind::boolean : cpu::MaskKind::additive,
          element_of(mask.dtype()).value_or(cpu::Element::f32),
          mask.data<char>(),
          stride(0),
          stride(1),
          stride(2),
          stride(3)};
}

cpu::ProjectedRows projected(const mx::array& x) {
  return {x.data<char>(), element_of(x.dtype()).value_or(cpu::Element::f32), x.strides(0), x.strides(1), x.strides(2)};
}

}  // namespace reprise::kernels::internal
