#include "reprise/kernels/linear_cpu.h"

#include <algorithm>
#include <array>
#include <vector>

#include "reprise/kernels/buffers.h"
#include "reprise/kernels/elementwise.h"
#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu {

namespace {

std::size_t size_of_rows(int rows, int cols) { return static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols); }

int divide_up(int a, int b) { return (a + b - 1) / b; }

// Rows that one task brings into the products' form: enough to be worth handing out.
constexpr int kRowsPerTask = 2 * kPrepareBlock;

// An input, normed where asked, in each of the forms that some maps want. One at a time in a thread.
class PreparedInput {
 public:
  PreparedInput(const Rows& x, const Norm& norm) : x_(x), norm_(norm) {}

  // Before run. Returns: which of the forms.
  std::size_t add(const WeightView& weight) {
    const InputForm form = input_form(weight, x_.rows);
    const auto found = std::find(forms_.begin(), forms_.end(), form);
    if (found != forms_.end()) return static_cast<std::size_t>(found - forms_.begin());
    forms_.push_back(form);
    offsets_.push_back(bytes_);
    bytes_ += prepared_bytes(form, x_.rows);
    return forms_.size() - 1;
  }

  void run(ThreadPool& pool) {
    memory_ = static_cast<std::byte*>(buffer(Buffer::prepared, bytes_));
    const auto cols = static_cast<std::size_t>(x_.cols);
    float* normed = norm_.weight ? float_buffer(Buffer::normed, size_of_rows(x_.rows, x_.cols)) : nullptr;
    const auto rows = [&](int begin, int end) {
      const float* input = x_.data;
      if (normed) {
        const std::size_t first = static_cast<std::size_t>(begin) * cols;
        cpu::rms_norm(x_.data + first, cols, end - begin, x_.cols, norm_.weight, norm_.eps, normed + first, cols);
        input = normed;
      }
      for (std::size_t i = 0; i < forms_.size(); ++i) {
        prepare(forms_[i], x_.rows, input, cols, begin, end, memory_ + offsets_[i]);
      }
    };
    if (x_.rows <= kRowsPerTask) return rows(0, x_.rows);
    pool.run(divide_up(x_.rows, kRowsPerTask),
             [&](int i) { rows(i * kRowsPerTask, std::min((i + 1) * kRowsPerTask, x_.rows)); });
  }

  const void* operator[](std::size_t form) const { return memory_ + offsets_[form]; }

 private:
  Rows x_;
  Norm norm_;
  std::vector<InputForm> forms_;
  std::vector<std::size_t> offsets_;
  std::size_t bytes_ = 0;
  std::byte* memory_ = nullptr;
};

struct ColumnTasks {
  int columns = 0;  // of each task but the last
  int tasks = 0;

  ColumnTasks(const WeightView& weight, int num_rows, int threads)
      : columns(columns_per_task(weight, num_rows, threads)), tasks(divide_up(weight.rows, columns)) {}
};

// Rows of one pass, so that memory of its own stays bounded: whole blocks, about even.
int rows_per_pass(int rows, std::size_t floats_per_row) {
  constexpr std::size_t kMaxFloats = std::size_t{2} << 20;
  const int most =
      std::max(4 * kPrepareBlock,
               static_cast<int>(std::min<std::size_t>(kMaxFloats / std::max<std::size_t>(floats_per_row, 1), 1024)));
  const int even = divide_up(rows, divide_up(rows, most));
  return divide_up(even, kPrepareBlock) * kPrepareBlock;
}

// Calls pass(first row, rows of x) until all have been taken.
template <typename Pass>
void in_passes(const Rows& x, std::size_t floats_per_row, const Pass& pass) {
  const int step = rows_per_pass(x.rows, floats_per_row);
  for (int begin = 0; begin < x.rows; begin += step) {
    const int rows = std::min(step, x.rows - begin);
    pass(static_cast<std::size_t>(begin), Rows{x.data + size_of_rows(begin, x.cols), rows, x.cols});
  }
}

// data = norm(data) (+ residual) over [rows, size].
void norm_output(const Norm& norm, const float* residual, int rows, int size, float* data, ThreadPool& pool) {
  const auto width = static_cast<std::size_t>(size);
  const auto part = [&](int begin, int end) {
    const std::size_t at = size_of_rows(begin, size);
    rms_norm(data + at, width, end - begin, size, norm.weight, norm.eps, data + at, width);
    add(nullptr, residual ? residual + at : nullptr, width, end - begin, size, data + at, width);
  };
  if (rows <= kRowsPerTask) return part(0, rows);
  pool.run(divide_up(rows, kRowsPerTask),
           [&](int i) { part(i * kRowsPerTask, std::min((i + 1) * kRowsPerTask, rows)); });
}

void linear_pass(const Rows& x, std::size_t first_row, const Norm& norm, std::span<const LinearOutput> outputs,
                 ThreadPool& pool) {
  struct Part {
    const LinearOutput* output;
    std::size_t form;
    ColumnTasks cut;
    int first_task;
  };
  PreparedInput input(x, norm);
  std::vector<Part> parts;
  parts.reserve(outputs.size());
  int tasks = 0;
  for (const LinearOutput& output : outputs) {
    const WeightView& weight = output.map.weight;
    parts.push_back({&output, input.add(weight), ColumnTasks(weight, x.rows, pool.threads()), tasks});
    tasks += parts.back().cut.tasks;
  }
  input.run(pool);
  pool.run(tasks, [&](int task) {
    const auto after = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.first_task > task; });
    const Part& part = *(after - 1);
    const auto& [map, residual, norm_after, data] = *part.output;
    const auto ldo = static_cast<std::size_t>(map.weight.rows);
    const int begin = (task - part.first_task) * part.cut.columns;
    const int end = std::min(begin + part.cut.columns, map.weight.rows);
    const std::size_t at = first_row * ldo + static_cast<std::size_t>(begin);
    multiply(map.weight, x.rows, input[part.form], begin, end, data + at, ldo);
    const float* added = residual && !norm_after.weight ? residual + at : nullptr;
    add(map.bias ? map.bias + begin : nullptr, added, ldo, x.rows, end - begin, data + at, ldo);
  });
  for (const LinearOutput& output : outputs) {
    if (!output.norm.weight) continue;
    const int size = output.map.weight.rows;
    const std::size_t at = first_row * static_cast<std::size_t>(size);
    norm_output(output.norm, output.residual ? output.residual + at : nullptr, x.rows, size, output.data + at, pool);
  }
}

void gated_mlp_pass(const Rows& x, std::size_t first_row, const Norm& norm, const GatedMlp& mlp, const float* residual,
                    float* out, ThreadPool& pool) {
  const auto& [gate, up, down, activation, output_norm] = mlp;
  PreparedInput input(x, norm);
  const std::size_t gate_form = input.add(gate.weight);
  const std::size_t up_form = input.add(up.weight);
  input.run(pool);

  const int F = gate.weight.rows;
  const auto ldh = static_cast<std::size_t>(F);
  float* hidden = float_buffer(Buffer::hidden, size_of_rows(x.rows, F));
  const ColumnTasks cut(gate.weight, 2 * x.rows, pool.threads());
  pool.run(cut.tasks, [&](int task) {
    const int begin = task * cut.columns;
    const int end = std::min(begin + cut.columns, F);
    const auto width = static_cast<std::size_t>(end - begin);
    const std::size_t size = size_of_rows(x.rows, end - begin);
    float* g = float_buffer(Buffer::gate, size);
    float* u = float_buffer(Buffer::up, size);
    multiply(gate.weight, x.rows, input[gate_form], begin, end, g, width);
    add(gate.bias ? gate.bias + begin : nullptr, nullptr, 0, x.rows, end - begin, g, width);
    multiply(up.weight, x.rows, input[up_form], begin, end, u, width);
    add(up.bias ? up.bias + begin : nullptr, nullptr, 0, x.rows, end - begin, u, width);
    activation == Activation::silu ? silu_times(g, u, size) : gelu_tanh_times(g, u, size);
    for (std::size_t m = 0; m < static_cast<std::size_t>(x.rows); ++m) {
      std::copy_n(g + m * width, width, hidden + m * ldh + static_cast<std::size_t>(begin));
    }
  });

  const LinearOutput output{down,
                            residual ? residual + first_row * static_cast<std::size_t>(down.weight.rows) : nullptr,
                            output_norm, out + first_row * static_cast<std::size_t>(down.weight.rows)};
  linear_pass({hidden, x.rows, F}, 0, {}, {&output, 1}, pool);
}

}  // namespace

void linear(const Rows& x, const Norm& norm, std::span<const LinearOutput> outputs, ThreadPool& pool) {
  if (outputs.empty()) return;
  in_passes(x, static_cast<std::size_t>(x.cols),
            [&](std::size_t first, const Rows& rows) { linear_pass(rows, first, norm, outputs, pool); });
}

void gated_mlp(const Rows& x, const Norm& norm, const GatedMlp& mlp, const float* residual, float* out,
               ThreadPool& pool) {
  in_passes(x, static_cast<std::size_t>(mlp.gate.weight.rows),
            [&](std::size_t first, const Rows& rows) { gated_mlp_pass(rows, first, norm, mlp, residual, out, pool); });
}

void rms_norm(const Rows& x, const Norm& norm, float* out, ThreadPool& pool) {
  const auto cols = static_cast<std::size_t>(x.cols);
  const auto rows = [&](int begin, int end) {
    const std::size_t first = static_cast<std::size_t>(begin) * cols;
    rms_norm(x.data + first, cols, end - begin, x.cols, norm.weight, norm.eps, out + first, cols);
  };
  if (x.rows <= kRowsPerTask) return rows(0, x.rows);
  pool.run(divide_up(x.rows, kRowsPerTask),
           [&](int i) { rows(i * kRowsPerTask, std::min((i + 1) * kRowsPerTask, x.rows)); });
}

}  // namespace reprise::kernels::cpu
