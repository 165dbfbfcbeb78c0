#include "reprise/kernels/few_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/few_rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_portable.h"
#include "reprise/kernels/few_rows_quantized.h"
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "reprise/kernels/few_rows_dense-inl.h"
#include "reprise/kernels/few_rows_prepare-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {

void prepare_rows(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end,
                  void* prepared) {
#if REPRISE_FEW_ROWS_PORTABLE
  static_cast<void>(num_rows);
  portable::prepare(form, x, ldx, begin, end, prepared);
#else
  prepare_all(form, num_rows, x, ldx, begin, end, prepared);
#endif
}

void multiply_dense_rows(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
                         std::size_t ldo) {
#if REPRISE_FEW_ROWS_PORTABLE
  portable::multiply(weight, num_rows, prepared, begin, end, out, ldo);
#else
  const Layout layout({weight.cols, 0, 0, true}, num_rows, hn::Lanes(Bytes()));
  const auto* rows = static_cast<const std::uint8_t*>(prepared);
  switch (weight.element) {
    case Element::f16:
      return multiply_dense<hwy::float16_t>(weight, layout, num_rows, rows, begin, end, out, ldo);
    case Element::bf16:
      return multiply_dense<hwy::bfloat16_t>(weight, layout, num_rows, rows, begin, end, out, ldo);
    case Element::f32:
      return multiply_dense<float>(weight, layout, num_rows, rows, begin, end, out, ldo);
    case Element::e8m0:
      return;  // of no dense weight
  }
#endif
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::few_rows {

HWY_EXPORT(prepare_rows);
HWY_EXPORT(multiply_dense_rows);

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return round_up(std::max(Layout(form, num_rows, kMaxVectorBytes).bytes, portable::prepared_bytes(form, num_rows)),
                  kMaxVectorBytes);
}

void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared) {
  HWY_DYNAMIC_DISPATCH(prepare_rows)(form, num_rows, x, ldx, begin, end, prepared);
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  if (weight.bits != 0) return multiply_quantized(weight, num_rows, prepared, begin, end, out, ldo);
  HWY_DYNAMIC_DISPATCH(multiply_dense_rows)(weight, num_rows, prepared, begin, end, out, ldo);
}

}  // namespace reprise::kernels::cpu::few_rows
#endif
