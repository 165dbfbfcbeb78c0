#include "reprise/kernels/delta_rule.h"

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
#include "reprise/kernels/delta_rule_cpu.h"
#include "reprise/kernels/flat_array.h"
#include "reprise/kernels/reference.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

bool is_vector(const mx::array& x, int size) { return x.shape() == mx::Shape{size} && x.dtype() == mx::float32; }

void check(const DeltaRuleInputs& inputs, const DeltaRuleParams& p, const std::optional<mx::array>& state) {
  const auto fail = [] {
    throw Error(ErrorCode::invalid_argument,
                "[gated_delta_rule] qkv [B, L, 2 Hk Dk + Hv Dv], a and b [B, L, Hv], real [B, L] and the state "
                "[B, Hv, Dv, Dk] must agree");
  };
  const bool heads = p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0 && p.key_dim > 0 &&
                     p.value_dim > 0 && is_vector(p.decay, p.value_heads) && is_vector(p.dt_bias, p.value_heads);
  if (!heads || inputs.qkv.ndim() != 3 || inputs.qkv.size() == 0) fail();
  const int B = inputs.qkv.shape(0);
  const int L = inputs.qkv.shape(1);
  const mx::Shape per_head = {B, L, p.value_heads};
  const bool fits = inputs.qkv.shape(2) == 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim &&
                    inputs.a.shape() == per_head && inputs.b.shape() == per_head &&
                    (!inputs.real || (inputs.real->shape() == mx::Shape{B, L} && inputs.real->dtype() == mx::bool_)) &&
                    (!state || state->shape() == mx::Shape{B, p.value_heads, p.value_dim, p.key_dim});
  if (!fits) fail();
}

// Inputs: qkv, a and b, then what is there of real and state.
class DeltaRule final : public mx::Primitive {
 public:
  DeltaRule(mx::Stream stream, DeltaRuleParams params, bool has_real)
      : Primitive(stream), params_(std::move(params)), has_real_(has_real) {}

  const char* name() const override { return "GatedDeltaRule"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::internal, "[gated_delta_rule] a CPU operation was sent to a GPU");
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& output = outputs[0];
    mx::array& state = outputs[1];
    output.set_data(mx::allocator::malloc(output.nbytes()));
    const std::size_t num_before = has_real_ ? 4 : 3;
    const mx::array* initial = inputs.size() > num_before ? &inputs[num_before] : nullptr;
    if (initial != nullptr && is_free(inputs, *initial, outputs)) {
      state.copy_shared_buffer(*initial);
    } else {
      state.set_data(mx::allocator::malloc(state.nbytes()));
    }
    cpu::DeltaRuleView view{.rows = output.shape(0),
                            .columns = output.shape(1),
                            .key_heads = params_.key_heads,
                            .value_heads = params_.value_heads,
                            .key_dim = params_.key_dim,
                            .value_dim = params_.value_dim,
                            .decay = params_.decay.data<float>(),
                            .dt_bias = params_.dt_bias.data<float>(),
                            .state = state.data<float>(),
                            .output = output.data<float>()};
    using Floats = internal::FlatArray<float>;
    std::vector<Floats> floats = {Floats(inputs[0]), Floats(inputs[1]), Floats(inputs[2])};
    if (initial != nullptr) floats.emplace_back(*initial);
    std::vector<internal::FlatArray<std::uint8_t>> real;
    if (has_real_) real.emplace_back(inputs[3]);
    // The captured parameters keep their memory.
    mx::cpu::get_command_encoder(stream()).dispatch(
        [view, params = params_, floats = std::move(floats), real = std::move(real)]() mutable {
          const ProfileScope scope("delta_rule");
          view.qkv = floats[0].get();
          view.a = floats[1].get();
          view.b = floats[2].get();
          if (floats.size() > 3) view.initial = floats[3].get();
          if (!real.empty()) view.real = real[0].get();
          cpu::gated_delta_rule(view, ThreadPool::process());
        });
  }

 private:
  // Whether nobody else holds the state's memory. Each output holds the inputs: only one of them may while it is asked.
  static bool is_free(const std::vector<mx::array>& inputs, const mx::array& state, std::vector<mx::array>& outputs) {
    std::vector<mx::array*> others;
    for (mx::array& output : outputs) {
      if (&output.inputs() != &inputs) others.push_back(&output);
    }
    for (mx::array* output : others) output->inputs().clear();
    const bool free = state.is_donatable() && state.flags().row_contiguous && state.size() == state.data_size();
    for (mx::array* output : others) output->inputs() = inputs;
    return free;
  }

  DeltaRuleParams params_;
  bool has_real_;
};

}  // namespace

DeltaRuleResult gated_delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleParams& params,
                                 const std::optional<mx::array>& state) {
  check(inputs, params, state);
  if (!internal::use_kernels()) return reference::gated_delta_rule(inputs, params, state);
  if (!params.decay.is_available() || !params.dt_bias.is_available()) mx::eval({params.decay, params.dt_bias});
  const auto wide = [](const mx::array& x) { return mx::astype(x, mx::float32); };
  std::vector<mx::array> arrays = {wide(inputs.qkv), wide(inputs.a), wide(inputs.b)};
  if (inputs.real) arrays.push_back(*inputs.real);
  if (state) arrays.push_back(wide(*state));
  const int B = inputs.qkv.shape(0);
  auto primitive =
      std::make_shared<DeltaRule>(mx::default_stream(mx::Device(mx::Device::cpu)), params, inputs.real.has_value());
  auto outputs = mx::array::make_arrays({{B, inputs.qkv.shape(1), params.value_heads, params.value_dim},
                                         {B, params.value_heads, params.value_dim, params.key_dim}},
                                        {mx::float32, mx::float32}, primitive, arrays);
  return {mx::astype(outputs[0], inputs.qkv.dtype()), outputs[1]};
}

}  // namespace reprise::kernels
