#include "reprise/kernels/scan.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/columns.h"
#include "reprise/kernels/flat_array.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/scan_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

// What a scan's arrays must be, beside their batch and length.
struct Sizes {
  int channels;
  int steps;  // of delta
  int maps;   // of b and c
  mx::Shape state;
};

void check(const char* function, const ScanInputs& inputs, const Sizes& sizes) {
  const mx::Shape shape = inputs.x.shape();
  const auto is = [&](const mx::array& array, int size) {
    return array.shape() == mx::Shape{shape[0], shape[1], size};
  };
  if (shape.size() == 3 && shape[1] >= 1 && is(inputs.x, sizes.channels) && is(inputs.delta, sizes.steps) &&
      is(inputs.b, sizes.maps) && is(inputs.c, sizes.maps) && (!inputs.gate || inputs.gate->shape() == shape) &&
      (!inputs.mask || inputs.mask->shape() == mx::Shape{shape[0], shape[1]}) &&
      (!inputs.state || inputs.state->shape() == sizes.state)) {
    return;
  }
  throw Error(ErrorCode::invalid_argument, std::string("[kernels::") + function +
                                               "] x, delta, b, c, gate, mask and state must fit the scan's sizes");
}

// What a scan is made with, as pointers that live as long as it.
struct Parameters {
  std::shared_ptr<const void> owner;
  std::vector<float> storage[3];
  cpu::ScanView view;  // what does not depend on the inputs

  template <typename Scan>
  Parameters(const std::shared_ptr<const Scan>& scan, int heads, int head_size, int states) : owner(scan) {
    view = {.heads = heads,
            .head_size = head_size,
            .states = states,
            .a = floats_of_vector(scan->a, storage[0]),
            .d = floats_of_vector(scan->d, storage[1]),
            .low = scan->steps.low,
            .high = scan->steps.high};
    if (scan->steps.bias) view.bias = floats_of_vector(*scan->steps.bias, storage[2]);
  }

  static const float* floats_of_vector(const mx::array& vector, std::vector<float>& storage) {
    if (const float* floats = internal::floats_of(vector, storage)) return floats;
    throw Error(ErrorCode::invalid_argument, "[kernels::scan] a, d and bias must be floating and contiguous");
  }
};

struct Kind {
  const char* name;
  int (*num_tasks)(const cpu::ScanView&);
  void (*run_task)(const cpu::ScanView&, int);
};

constexpr Kind kSelective = {"selective_scan", cpu::num_selective_scan_tasks, cpu::run_selective_scan_task};
constexpr Kind kHeads = {"head_scan", cpu::num_head_scan_tasks, cpu::run_head_scan_task};

// Inputs: x, delta, b, c, then gate, mask and state, those that are there.
class Scan final : public mx::Primitive {
 public:
  Scan(mx::Stream stream, const Kind& kind, std::shared_ptr<const Parameters> parameters, const ScanInputs& inputs)
      : Primitive(stream),
        kind_(kind),
        parameters_(std::move(parameters)),
        has_gate_(inputs.gate.has_value()),
        has_mask_(inputs.mask.has_value()),
        has_state_(inputs.state.has_value()) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    cpu::ScanView view = parameters_->view;
    view.rows = inputs[0].shape(0);
    view.columns = inputs[0].shape(1);
    view.y = outputs[0].data<float>();
    view.state = outputs[1].data<float>();
    std::vector<internal::Columns> columns;
    std::vector<internal::FlatArray<std::uint8_t>> mask;
    std::vector<internal::FlatArray<float>> state;
    const std::size_t num_columns = has_gate_ ? 5 : 4;
    for (std::size_t i = 0; i < num_columns; ++i) columns.emplace_back(inputs[i]);
    if (has_mask_) mask.emplace_back(inputs[num_columns]);
    if (has_state_) state.emplace_back(inputs.back());
    mx::cpu::get_command_encoder(stream()).dispatch([view, columns = std::move(columns), mask = std::move(mask),
                                                     state = std::move(state), kind = kind_,
                                                     parameters = parameters_]() mutable {
      const ProfileScope scope(kind.name);
      view.x = columns[0].view();
      view.delta = columns[1].view();
      view.b = columns[2].view();
      view.c = columns[3].view();
      if (columns.size() > 4) view.gate = columns[4].view();
      if (!mask.empty()) view.mask = mask.front().get();
      if (!state.empty()) view.initial = state.front().get();
      ThreadPool::process().run(kind.num_tasks(view), [&](int task) { kind.run_task(view, task); });
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::internal, std::string("[") + kind_.name + "] a CPU operation was sent to a GPU");
  }
  const char* name() const override { return kind_.name; }

 private:
  Kind kind_;
  std::shared_ptr<const Parameters> parameters_;
  bool has_gate_;
  bool has_mask_;
  bool has_state_;
};

ScanResult run(const Kind& kind, const std::shared_ptr<const Parameters>& parameters, const ScanInputs& inputs,
               const mx::Shape& state) {
  const auto wide = [](const mx::array& array) { return mx::astype(array, mx::float32); };
  std::vector<mx::array> arrays = {wide(inputs.x), wide(inputs.delta), wide(inputs.b), wide(inputs.c)};
  if (inputs.gate) arrays.push_back(wide(*inputs.gate));
  if (inputs.mask) arrays.push_back(mx::astype(*inputs.mask, mx::uint8));
  if (inputs.state) arrays.push_back(wide(*inputs.state));
  const auto primitive =
      std::make_shared<Scan>(mx::default_stream(mx::Device(mx::Device::cpu)), kind, parameters, inputs);
  auto outputs = mx::array::make_arrays({inputs.x.shape(), state}, {mx::float32, mx::float32}, primitive, arrays);
  return {mx::astype(outputs[0], inputs.x.dtype()), outputs[1]};
}

}  // namespace

ScanResult selective_scan(const ScanInputs& inputs, const std::shared_ptr<const SelectiveScan>& scan) {
  const int channels = scan->a.shape(0);
  const int N = scan->a.shape(1);
  const mx::Shape state = {inputs.x.shape(0), channels, N};
  check("selective_scan", inputs, {.channels = channels, .steps = channels, .maps = N, .state = state});
  if (!internal::use_kernels()) return reference::selective_scan(inputs, scan);
  return run(kSelective, std::make_shared<const Parameters>(scan, channels, 1, N), inputs, state);
}

ScanResult head_scan(const ScanInputs& inputs, const std::shared_ptr<const HeadScan>& scan) {
  const int heads = scan->a.shape(0);
  const int P = inputs.x.shape(-1) / heads;
  const int N = inputs.b.shape(-1) / scan->groups;
  const mx::Shape state = {inputs.x.shape(0), heads, P, N};
  check("head_scan", inputs, {.channels = heads * P, .steps = heads, .maps = scan->groups * N, .state = state});
  if (!internal::use_kernels()) return reference::head_scan(inputs, scan);
  auto parameters = std::make_shared<Parameters>(scan, heads, P, N);
  parameters->view.groups = scan->groups;
  return run(kHeads, parameters, inputs, state);
}

}  // namespace reprise::kernels
