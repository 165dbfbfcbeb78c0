#include "reprise/kernels/products.h"

#include <algorithm>

#include "reprise/kernels/few_rows.h"
#include "reprise/kernels/many_rows.h"

namespace reprise::kernels::cpu {
namespace {

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

InputForm input_form(const WeightView& weight, int num_rows) {
  return {weight.cols, weight.bits, weight.bits == 0 ? 0 : weight.group_size, num_rows <= few_rows::kMaxRows};
}

std::size_t prepared_bytes(const InputForm& form, int num_rows) {
  return form.few_rows ? few_rows::prepared_bytes(form, num_rows) : many_rows::prepared_bytes(form, num_rows);
}

void prepare(const InputForm& form, int num_rows, const float* x, std::size_t ldx, int begin, int end, void* prepared) {
  if (form.few_rows) {
    few_rows::prepare(form, num_rows, x, ldx, begin, end, prepared);
  } else {
    many_rows::prepare(form, num_rows, x, ldx, begin, end, prepared);
  }
}

void multiply(const WeightView& weight, int num_rows, const void* prepared, int begin, int end, float* out,
              std::size_t ldo) {
  if (num_rows <= few_rows::kMaxRows) {
    few_rows::multiply(weight, num_rows, prepared, begin, end, out, ldo);
  } else {
    many_rows::multiply(weight, num_rows, prepared, begin, end, out, ldo);
  }
}

int columns_per_task(const WeightView& weight, int num_rows, int threads) {
  // A task of at least this many multiplications pays for being handed out.
  constexpr long kWorthHandingOut = 100'000;
  const long per_column = static_cast<long>(weight.cols) * num_rows;
  const int least = static_cast<int>(std::min<long>(weight.rows, kWorthHandingOut / std::max(1L, per_column)));
  // Several tasks a thread, so that a thread that was held up does not hold up the others.
  constexpr int kTasksPerThread = 4;
  const int even =
      threads <= 1 ? weight.rows : (weight.rows + threads * kTasksPerThread - 1) / (threads * kTasksPerThread);
  const int most = std::max(kColumnBlock, round_up(std::max(least, even), kColumnBlock));
  // Of smaller tasks, the largest with which the threads end sooner: 640 columns are better cut in ten than in seven.
  const auto columns_of_one_thread = [&](int columns) {
    const int tasks = (weight.rows + columns - 1) / columns;
    return (tasks + threads - 1) / threads * columns;
  };
  int best = most;
  for (int columns = most - kColumnBlock; 2 * columns >= most; columns -= kColumnBlock) {
    if (columns_of_one_thread(columns) < columns_of_one_thread(best)) best = columns;
  }
  return best;
}

}  // namespace reprise::kernels::cpu
