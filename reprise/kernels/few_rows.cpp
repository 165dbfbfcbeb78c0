#include "reprise/kernels/few_rows.h"

#include <algorithm>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_portable.h"

// The kernels keep vectors in arrays, which vectors of unknown length cannot be.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/few_rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "reprise/kernels/few_rows_dense-inl.h"
#include "reprise/kernels/few_rows_packed-inl.h"
#include "reprise/kernels/few_rows_prepare-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

void prepare(const InputForm& form, int /*num_rows*/, const float* x, std::size_t ldx, int begin, int end,
             void* prepared) {
  portable::prepare(form, x, ldx, begin, end, prepared);
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  portable::multiply(weight, num_rows, prepared, begin, end, out, ldo);
}

#else

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  const InputForm form{weight.cols, weight.bits, weight.group_size, true};
  const Layout layout(form, num_rows, hn::Lanes(Bytes()));
  const auto* rows = static_cast<const std::uint8_t*>(prepared);
  if (weight.bits == 0) {
    if (weight.element == Element::f16) {
      multiply_dense<hwy::float16_t>(weight, layout, num_rows, rows, begin, end, out, ldo);
    } else if (weight.element == Element::bf16) {
      multiply_dense<hwy::bfloat16_t>(weight, layout, num_rows, rows, begin, end, out, ldo);
    } else {
      multiply_dense<float>(weight, layout, num_rows, rows, begin, end, out, ldo);
    }
  } else if (weight.bits == 4) {
    multiply_packed<4>(weight, layout, num_rows, rows, begin, end, out, ldo);
  } else if (weight.bits == 2) {
    multiply_packed<2>(weight, layout, num_rows, rows, begin, end, out, ldo);
  } else {
    multiply_packed<8>(weight, layout, num_rows, rows, begin, end, out, ldo);
  }
}

#endif
}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::few_rows {

HWY_EXPORT(prepare);
HWY_EXPORT(multiply);

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return std::max(Layout(form, num_rows, kMaxVectorBytes).bytes,
                  round_up(portable::prepared_bytes(form, num_rows), kMaxVectorBytes));
}

void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared) {
  HWY_DYNAMIC_DISPATCH(prepare)(form, num_rows, x, ldx, begin, end, prepared);
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  HWY_DYNAMIC_DISPATCH(multiply)(weight, num_rows, prepared, begin, end, out, ldo);
}

}  // namespace reprise::kernels::cpu::few_rows
#endif
