#include "reprise/kernels/many_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "reprise/kernels/many_rows_plan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reprise/kernels/many_rows.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#if HWY_TARGET != HWY_SCALAR
#include "reprise/kernels/many_rows_float-inl.h"
#include "reprise/kernels/many_rows_int16-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// Without vectors of Highway's: float32 products, as the compiler makes them.
void prepare_quantised(const InputForm& form, int /*num_rows*/, const float* x, std::size_t ldx, int begin, int end,
                       void* prepared) {
  const auto cols = static_cast<std::size_t>(form.cols);
  for (auto m = static_cast<std::size_t>(begin); m < static_cast<std::size_t>(end); ++m) {
    std::memcpy(static_cast<float*>(prepared) + m * cols, x + m * ldx, cols * sizeof(float));
  }
}

void multiply_columns(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
                      std::size_t ldo) {
  const auto cols = static_cast<std::size_t>(weight.cols);
  std::vector<float> column(cols);
  for (int n = begin; n < end; ++n) {
    unpack_row(weight, n, column.data());
    for (std::size_t m = 0; m < static_cast<std::size_t>(num_rows); ++m) {
      const float* row = static_cast<const float*>(prepared) + m * cols;
      constexpr std::size_t kSums = 8;
      float sums[kSums] = {};
      std::size_t k = 0;
      for (; k + kSums <= cols; k += kSums) {
        for (std::size_t i = 0; i < kSums; ++i) sums[i] += row[k + i] * column[k + i];
      }
      for (; k < cols; ++k) sums[k % kSums] += row[k] * column[k];
      float sum = 0;
      for (const float part : sums) sum += part;
      out[m * ldo + static_cast<std::size_t>(n - begin)] = sum;
    }
  }
}
#else
void prepare_quantised(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end,
                       void* prepared) {
  prepare_int16(Int16Rows(form, num_rows, prepared), static_cast<std::size_t>(form.group_size), x, ldx,
                static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
}

void multiply_columns(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
                      std::size_t ldo) {
  const auto rows = static_cast<std::size_t>(num_rows);
  const auto first = static_cast<std::size_t>(begin);
  const auto last = static_cast<std::size_t>(end);
  if (weight.bits == 0) {
    multiply_float(weight, static_cast<const float*>(prepared), rows, first, last, out, ldo);
  } else {
    const Int16Rows inputs({weight.cols, weight.bits, weight.group_size, false}, num_rows, const_cast<void*>(prepared));
    multiply_int16(weight, inputs, rows, first, last, out, ldo);
  }
}
#endif

}  // namespace reprise::kernels::cpu::many_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace reprise::kernels::cpu::many_rows {
namespace {

HWY_EXPORT(prepare_quantised);
HWY_EXPORT(multiply_columns);

constexpr std::align_val_t kAlignment = std::align_val_t(64);
struct Free {
  void operator()(float* memory) const { ::operator delete[](memory, kAlignment); }
};

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Scratch::Scratch(std::size_t floats) {
  thread_local std::unique_ptr<float[], Free> memory;
  thread_local std::size_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory.reset(new (kAlignment) float[floats]);
    size = floats;
  }
  next_ = memory.get();
}

float* Scratch::take(std::size_t floats) {
  float* const taken = next_;
  next_ += floats;
  return taken;
}

Int16Rows::Int16Rows(const InputForm& form, int num_rows, void* prepared)
    : pairs(static_cast<std::int32_t*>(prepared)),
      pairs_per_row(static_cast<std::size_t>(form.cols) / 2),
      groups(static_cast<std::size_t>(form.cols / form.group_size)) {
  const auto rows = static_cast<std::size_t>(num_rows);
  scales = reinterpret_cast<float*>(pairs + rows * pairs_per_row);
  sums = scales + rows * groups;
}

std::size_t Int16Rows::bytes(const InputForm& form, int num_rows) {
  const auto cols = static_cast<std::size_t>(form.cols);
  return static_cast<std::size_t>(num_rows) *
         (cols * sizeof(std::int16_t) + 2 * sizeof(float) * cols / static_cast<std::size_t>(form.group_size));
}

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  // As floats they take more; without vectors they stay so.
  const std::size_t floats = static_cast<std::size_t>(form.cols) * static_cast<std::size_t>(num_rows) * sizeof(float);
  return round_up(form.bits == 0 ? floats : std::max(floats, Int16Rows::bytes(form, num_rows)), 64);
}

void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared) {
  if (form.bits != 0) {
    HWY_DYNAMIC_DISPATCH(prepare_quantised)(form, num_rows, x, ldx, begin, end, prepared);
    return;
  }
  const auto cols = static_cast<std::size_t>(form.cols);
  for (auto m = static_cast<std::size_t>(begin); m < static_cast<std::size_t>(end); ++m) {
    std::memcpy(static_cast<float*>(prepared) + m * cols, x + m * ldx, cols * sizeof(float));
  }
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  HWY_DYNAMIC_DISPATCH(multiply_columns)(weight, num_rows, prepared, begin, end, out, ldo);
}

}  // namespace reprise::kernels::cpu::many_rows
#endif
