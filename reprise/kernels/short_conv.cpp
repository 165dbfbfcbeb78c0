#include "reprise/kernels/short_conv.h"

#include <cstdint>
#include <utility>

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
#include "reprise/kernels/short_conv_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

void check(const ShortConvInputs& inputs, const ShortConvParams& params) {
  const mx::array& x = inputs.x;
  const mx::array& weight = params.weight;
  if (x.ndim() == 3 && x.shape(1) >= 1 && weight.ndim() == 2 && weight.shape(0) == x.shape(2) && weight.shape(1) >= 1 &&
      (!params.bias || params.bias->shape() == mx::Shape{x.shape(2)}) &&
      (!inputs.state || inputs.state->shape() == mx::Shape{x.shape(0), weight.shape(1) - 1, x.shape(2)}) &&
      (!inputs.mask || inputs.mask->shape() == mx::Shape{x.shape(0), x.shape(1)}) &&
      (!inputs.lengths || inputs.lengths->size() == static_cast<std::size_t>(x.shape(0)))) {
    return;
  }
  throw Error(
      ErrorCode::invalid_argument,
      "[short_conv] x [B, L, C], state [B, K - 1, C], weight [C, K], bias [C], mask [B, L] and lengths [B] must "
      "agree");
}

// What an evaluation needs beside its arrays. Pointers live as long as it.
struct Settings {
  ShortConvParams params;
  std::vector<float> storage[2] = {};
  std::vector<int> lengths = {};  // empty: none
  cpu::ShortConvView view = {};   // what does not depend on the inputs
};

std::shared_ptr<const Settings> settings_of(const ShortConvInputs& inputs, const ShortConvParams& params) {
  auto settings = std::make_shared<Settings>(Settings{params});
  cpu::ShortConvView& view = settings->view;
  view.rows = inputs.x.shape(0);
  view.columns = inputs.x.shape(1);
  view.channels = inputs.x.shape(2);
  view.width = params.weight.shape(1);
  view.silu = params.activation == ConvActivation::silu;
  view.weight = internal::floats_of(settings->params.weight, settings->storage[0]);
  if (params.bias) view.bias = internal::floats_of(*settings->params.bias, settings->storage[1]);
  if (view.weight == nullptr || (params.bias && view.bias == nullptr)) return nullptr;
  if (inputs.lengths) {
    settings->lengths = *inputs.lengths;
    view.lengths = settings->lengths.data();
  }
  return settings;
}

// Inputs: x, then state and mask, those that are there.
class Convolution final : public mx::Primitive {
 public:
  Convolution(mx::Stream stream, std::shared_ptr<const Settings> settings, const ShortConvInputs& inputs)
      : Primitive(stream),
        settings_(std::move(settings)),
        has_state_(inputs.state.has_value()),
        has_mask_(inputs.mask.has_value()) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    cpu::ShortConvView view = settings_->view;
    view.output = outputs[0].data<float>();
    view.state = outputs[1].data<float>();
    internal::Columns x(inputs[0]);
    std::vector<internal::FlatArray<float>> state;
    std::vector<internal::FlatArray<std::uint8_t>> mask;
    if (has_state_) state.emplace_back(inputs[1]);
    if (has_mask_) mask.emplace_back(inputs.back());
    mx::cpu::get_command_encoder(stream()).dispatch(
        [view, x = std::move(x), state = std::move(state), mask = std::move(mask), settings = settings_]() mutable {
          const ProfileScope scope("short_conv");
          view.x = x.view();
          if (!state.empty()) view.initial = state.front().get();
          if (!mask.empty()) view.mask = mask.front().get();
          ThreadPool::process().run(cpu::num_short_conv_tasks(view),
                                    [&](int task) { cpu::run_short_conv_task(view, task); });
        });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::internal, "[short_conv] a CPU operation was sent to a GPU");
  }
  const char* name() const override { return "ShortConv"; }

 private:
  std::shared_ptr<const Settings> settings_;
  bool has_state_;
  bool has_mask_;
};

}  // namespace

ShortConvResult short_conv(const ShortConvInputs& inputs, const ShortConvParams& params) {
  check(inputs, params);
  const auto settings = internal::use_kernels() ? settings_of(inputs, params) : nullptr;
  if (!settings) return reference::short_conv(inputs, params);
  std::vector<mx::array> arrays = {mx::astype(inputs.x, mx::float32)};
  if (inputs.state) arrays.push_back(mx::astype(*inputs.state, mx::float32));
  if (inputs.mask) arrays.push_back(mx::astype(*inputs.mask, mx::uint8));
  const mx::Shape state = {inputs.x.shape(0), settings->view.width - 1, inputs.x.shape(2)};
  const auto primitive =
      std::make_shared<Convolution>(mx::default_stream(mx::Device(mx::Device::cpu)), settings, inputs);
  auto outputs = mx::array::make_arrays({inputs.x.shape(), state}, {mx::float32, mx::float32}, primitive, arrays);
  return {mx::astype(outputs[0], inputs.x.dtype()), mx::astype(outputs[1], inputs.x.dtype())};
}

}  // namespace reprise::kernels
