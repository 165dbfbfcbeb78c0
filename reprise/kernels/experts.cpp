#include "reprise/kernels/experts.h"

#include <algorithm>
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
#include "reprise/kernels/choice.h"
#include "reprise/kernels/experts_cpu.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

using internal::refuse;
using internal::text;

namespace {

void check_maps(const char* function, const ExpertMapsPtr& map) {
  if (!map) refuse(function, "maps must be given, but got null");
  internal::check_weight(function, map->weight, 3);
  if (map->bias && map->bias->shape() != mx::Shape{map->experts(), map->out()}) {
    refuse(function, "biases must be [" + std::to_string(map->experts()) + ", " + std::to_string(map->out()) +
                         "], but got " + text(map->bias->shape()));
  }
}

// x [..., in] or, where `per_slot` may be, [..., k, in].
void check_input(const char* function, const mx::array& x, const mx::array& experts, int in, bool per_slot) {
  if (experts.ndim() < 1 || !mx::issubdtype(experts.dtype(), mx::integer)) {
    refuse(function, "experts must be integers [..., k], but got " + text(experts.shape()));
  }
  mx::Shape shared = experts.shape();
  shared.back() = in;
  mx::Shape own = experts.shape();
  own.push_back(in);
  if (mx::issubdtype(x.dtype(), mx::floating) && (x.shape() == shared || (per_slot && x.shape() == own))) return;
  refuse(function, "x must be floating " + text(shared) + ", but got " + text(x.shape()));
}

// Maps with what keeps their pointers alive.
struct HeldMaps {
  ExpertMapsPtr maps;
  cpu::ExpertMap view = {};
  std::vector<float> bias = {};
};

// Returns: whether the kernels can read them.
bool hold(const ExpertMapsPtr& maps, HeldMaps& held) {
  held.maps = maps;
  const auto view = internal::view_of(maps->weight);
  if (!view) return false;
  held.view = {*view, maps->experts(), nullptr};
  if (maps->bias) held.view.bias = internal::floats_of(*maps->bias, held.bias);
  return !maps->bias || held.view.bias;
}

// What one evaluation does; immutable, shared with the tasks that run it.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual const char* name() const = 0;  // a literal, which profiles show
  virtual int experts() const = 0;
  virtual void run(const cpu::Rows& x, const cpu::Choices& choices, const float* weights, float* out,
                   ThreadPool& pool) const = 0;
};

class SwitchLinearOperation final : public Operation {
 public:
  bool hold_all(const ExpertMapsPtr& map) { return hold(map, map_); }
  const char* name() const override { return "switch linear"; }
  int experts() const override { return map_.view.experts; }
  void run(const cpu::Rows& x, const cpu::Choices& choices, const float*, float* out, ThreadPool& pool) const override {
    cpu::switch_linear(x, choices, map_.view, out, pool);
  }

 private:
  HeldMaps map_;
};

class SwitchGluOperation final : public Operation {
 public:
  bool hold_all(const ExpertGlu& glu) {
    if (const auto* clip = std::get_if<ClippedSwiglu>(&glu.activation)) {
      activation_ = cpu::ClippedSwiglu{clip->alpha, clip->limit};
    } else if (std::get<GateActivation>(glu.activation) == GateActivation::gelu_tanh) {
      activation_ = cpu::Activation::gelu_tanh;
    }
    return hold(glu.gate, gate_) && hold(glu.up, up_) && hold(glu.down, down_);
  }
  const char* name() const override { return "switch glu"; }
  int experts() const override { return gate_.view.experts; }
  void run(const cpu::Rows& x, const cpu::Choices& choices, const float* weights, float* out,
           ThreadPool& pool) const override {
    cpu::switch_glu(x, choices, {gate_.view, up_.view, down_.view, activation_}, weights, out, pool);
  }

 private:
  HeldMaps gate_;
  HeldMaps up_;
  HeldMaps down_;
  std::variant<cpu::Activation, cpu::ClippedSwiglu> activation_ = cpu::Activation::silu;
};

// Inputs: x float32, experts int32, perhaps weights float32, all row-contiguous.
class ExpertsPrimitive final : public mx::UnaryPrimitive {
 public:
  ExpertsPrimitive(mx::Stream stream, std::shared_ptr<const Operation> operation)
      : UnaryPrimitive(stream), operation_(std::move(operation)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const mx::array& x = inputs[0];
    const mx::array& experts = inputs[1];
    const int cols = x.shape(-1);
    const int k = experts.shape(-1);
    const cpu::Rows rows{x.data<float>(), static_cast<int>(x.size() / static_cast<std::size_t>(cols)), cols};
    const cpu::Choices choices{experts.data<std::int32_t>(),
                               static_cast<int>(experts.size() / static_cast<std::size_t>(k)), k};
    const float* weights = inputs.size() > 2 ? inputs[2].data<float>() : nullptr;
    // MLX keeps the inputs until the task is done; the operation keeps its maps.
    mx::cpu::get_command_encoder(stream()).dispatch([operation = operation_, rows, choices, weights,
                                                     to = out.data<float>()] {
      const ProfileScope scope(operation->name());
      const std::int32_t* const end = choices.experts + static_cast<std::ptrdiff_t>(choices.tokens) * choices.per_token;
      const auto is_expert = [&](std::int32_t id) { return id >= 0 && id < operation->experts(); };
      if (!std::all_of(choices.experts, end, is_expert)) {
        throw Error(ErrorCode::invalid_argument,
                    "[switch] experts must lie in [0, " + std::to_string(operation->experts()) + ")");
      }
      operation->run(rows, choices, weights, to, ThreadPool::process());
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw Error(ErrorCode::internal, std::string("[") + operation_->name() + "] a CPU operation was sent to a GPU");
  }

  const char* name() const override { return operation_->name(); }

 private:
  std::shared_ptr<const Operation> operation_;
};

mx::array apply(std::shared_ptr<const Operation> operation, const mx::array& x, const mx::array& experts,
                const std::optional<mx::array>& weights, const mx::Shape& shape) {
  std::vector<mx::array> inputs = {mx::contiguous(mx::astype(x, mx::float32)),
                                   mx::contiguous(mx::astype(experts, mx::int32))};
  if (weights) inputs.push_back(mx::contiguous(mx::astype(*weights, mx::float32)));
  const auto primitive =
      std::make_shared<ExpertsPrimitive>(mx::default_stream(mx::Device(mx::Device::cpu)), std::move(operation));
  return mx::astype(mx::array(shape, mx::float32, primitive, std::move(inputs)), x.dtype());
}

bool kernels_take(const mx::array& x) { return internal::use_kernels() && internal::element_of(x.dtype()); }

}  // namespace

int ExpertMaps::experts() const {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return dense->shape(0);
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) return m->packed.shape(0);
  return std::get<QuantizedWeight>(weight).packed.shape(0);
}

mx::array switch_linear(const mx::array& x, const mx::array& experts, const ExpertMapsPtr& map) {
  check_maps("switch_linear", map);
  check_input("switch_linear", x, experts, map->in(), /*per_slot=*/true);
  mx::Shape shape = experts.shape();
  shape.push_back(map->out());
  if (x.size() == 0 || experts.size() == 0) return mx::zeros(shape, x.dtype());
  auto operation = std::make_shared<SwitchLinearOperation>();
  if (!kernels_take(x) || !operation->hold_all(map)) return reference::switch_linear(x, experts, map);
  return apply(std::move(operation), x, experts, {}, shape);
}

mx::array switch_glu(const mx::array& x, const mx::array& experts, const ExpertGlu& glu,
                     const std::optional<mx::array>& weights) {
  for (const ExpertMapsPtr& map : {glu.gate, glu.up, glu.down}) check_maps("switch_glu", map);
  check_input("switch_glu", x, experts, glu.gate->in(), /*per_slot=*/false);
  const bool fits = glu.up->in() == glu.gate->in() && glu.up->out() == glu.gate->out() &&
                    glu.down->in() == glu.gate->out() && glu.up->experts() == glu.gate->experts() &&
                    glu.down->experts() == glu.gate->experts();
  if (!fits) {
    refuse("switch_glu", "gate and up must give what down takes, for as many experts, but got " +
                             std::to_string(glu.gate->out()) + ", " + std::to_string(glu.up->out()) + " and " +
                             std::to_string(glu.down->in()));
  }
  if (weights && (weights->shape() != experts.shape() || !mx::issubdtype(weights->dtype(), mx::floating))) {
    refuse("switch_glu", "weights must be floating " + text(experts.shape()) + ", but got " + text(weights->shape()));
  }
  mx::Shape shape = experts.shape();
  if (weights) {
    shape.back() = glu.down->out();
  } else {
    shape.push_back(glu.down->out());
  }
  if (x.size() == 0 || experts.size() == 0) return mx::zeros(shape, x.dtype());
  auto operation = std::make_shared<SwitchGluOperation>();
  if (!kernels_take(x) || !operation->hold_all(glu)) return reference::switch_glu(x, experts, glu, weights);
  return apply(std::move(operation), x, experts, weights, shape);
}

}  // namespace reprise::kernels
