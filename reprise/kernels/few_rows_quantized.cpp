#include "reprise/kernels/few_rows_quantized.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/few_rows_quantized.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_portable.h"
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "reprise/kernels/few_rows_quantized-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {

void multiply_quantized_rows(const WeightView& weight, int num_rows, const void* prepared, int begin, int end,
                             float* out, std::size_t ldo) {
#if REPRISE_FEW_ROWS_PORTABLE
  portable::multiply(weight, num_rows, prepared, begin, end, out, ldo);
#else
  const Layout layout({weight.cols, weight.bits, weight.group_size, true}, num_rows, hn::Lanes(Bytes()));
  const auto* rows = static_cast<const std::uint8_t*>(prepared);
  if (is_e2m1(weight)) {
    multiply_quantized<4, Values::e2m1>(weight, layout, num_rows, rows, begin, end, out, ldo);
  } else if (width_of(weight.bits) == 4) {
    multiply_quantized<4, Values::numbers>(weight, layout, num_rows, rows, begin, end, out, ldo);
  } else {
    multiply_quantized<8, Values::numbers>(weight, layout, num_rows, rows, begin, end, out, ldo);
  }
#endif
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::few_rows {

HWY_EXPORT(multiply_quantized_rows);

void multiply_quantized(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
                        std::size_t ldo) {
  HWY_DYNAMIC_DISPATCH(multiply_quantized_rows)(weight, num_rows, prepared, begin, end, out, ldo);
}

}  // namespace reprise::kernels::cpu::few_rows
#endif
