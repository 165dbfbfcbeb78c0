#include "reprise/kernels/rg_lru.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/flat_array.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rg_lru_cpu.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

void check(const RgLruInputs& inputs, const std::optional<mx::array>& state) {
  const mx::array& x = inputs.x;
  const bool fits = x.ndim() == 3 && x.size() > 0 && inputs.input_gate.shape() == x.shape() &&
                    inputs.recurrent_gate.shape() == x.shape() && inputs.decay.shape() == mx::Shape{x.shape(2)} &&
                    inputs.decay.dtype() == mx::float32 &&
                    (!inputs.real || (inputs.real->shape() == mx::Shape{x.shape(0), x.shape(1)} &&
                                      inputs.real->dtype() == mx::bool_)) &&
                    (!state || state->shape() == mx::Shape{x.shape(0), x.shape(2)});
  if (fits) return;
  throw Error(ErrorCode::invalid_argument,
              "[rg_lru] x and both gates [B, L, D], decay [D], real [B, L] and the state [B, D] must agree");
}

// Inputs: x, input gate and recurrent gate, then what is there of real and state.
class RgLru final : public mx::Primitive {
 public:
  RgLru(mx::Stream stream, mx::array decay, bool has_real)
      : Primitive(stream), decay_(std::move(decay)), has_real_(has_real) {}

  const char* name() const override { return "RgLru"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::internal, "[rg_lru] a CPU operation was sent to a GPU");
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    cpu::RgLruView view{.rows = inputs[0].shape(0),
                        .columns = inputs[0].shape(1),
                        .size = inputs[0].shape(2),
                        .decay = decay_.data<float>(),
                        .state = outputs[1].data<float>(),
                        .output = outputs[0].data<float>()};
    std::vector<internal::FlatArray<float>> floats;
    std::vector<internal::FlatArray<std::uint8_t>> real;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (has_real_ && i == 3) {
        real.emplace_back(inputs[i]);
      } else {
        floats.emplace_back(inputs[i]);
      }
    }
    // The captured decay keeps its memory.
    mx::cpu::get_command_encoder(stream()).dispatch(
        [view, decay = decay_, floats = std::move(floats), real = std::move(real)]() mutable {
          const ProfileScope scope("rg_lru");
          view.x = floats[0].get();
          view.input_gate = floats[1].get();
          view.recurrent_gate = floats[2].get();
          if (floats.size() > 3) view.initial = floats[3].get();
          if (!real.empty()) view.real = real[0].get();
          cpu::rg_lru(view, ThreadPool::process());
        });
  }

 private:
  mx::array decay_;
  bool has_real_;
};

}  // namespace

RgLruResult rg_lru(const RgLruInputs& inputs, const std::optional<mx::array>& state) {
  check(inputs, state);
  if (!internal::use_kernels()) return reference::rg_lru(inputs, state);
  if (!inputs.decay.is_available()) mx::eval({inputs.decay});
  const auto wide = [](const mx::array& x) { return mx::astype(x, mx::float32); };
  std::vector<mx::array> arrays = {wide(inputs.x), wide(inputs.input_gate), wide(inputs.recurrent_gate)};
  if (inputs.real) arrays.push_back(*inputs.real);
  if (state) arrays.push_back(wide(*state));
  auto primitive =
      std::make_shared<RgLru>(mx::default_stream(mx::Device(mx::Device::cpu)), inputs.decay, inputs.real.has_value());
  auto outputs = mx::array::make_arrays({inputs.x.shape(), {inputs.x.shape(0), inputs.x.shape(2)}},
                                        {mx::float32, mx::float32}, primitive, arrays);
  return {mx::astype(outputs[0], inputs.x.dtype()), outputs[1]};
}

}  // namespace reprise::kernels
