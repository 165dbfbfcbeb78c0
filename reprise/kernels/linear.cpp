#include "reprise/kernels/linear.h"

#include <memory>
#include <string>
#include <utility>

#include "mlx/ops.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rows_operation.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;
using internal::HeldNorm;
using internal::refuse;
using internal::RowsOperation;

namespace {

void check_input(const char* function, const mx::array& x, int in) {
  if (x.ndim() >= 1 && x.shape(-1) == in && mx::issubdtype(x.dtype(), mx::floating)) return;
  refuse(function, "x must be floating [..., " + std::to_string(in) + "], but got " +
                       (x.ndim() == 0 ? "a scalar" : "a last axis of " + std::to_string(x.shape(-1))));
}

void check_map(const char* function, const AffineMapPtr& map) {
  if (!map) refuse(function, "a map must be given, but got null");
  internal::check_weight(function, map->weight);
  if (map->bias && map->bias->shape() != mx::Shape{map->out()}) {
    refuse(function, "a bias must be [" + std::to_string(map->out()) + "], but got " +
                         std::to_string(map->bias->size()) + " elements");
  }
}

void check_norm(const char* function, const std::optional<RmsNormParams>& norm, int in) {
  if (!norm || norm->weight.shape() == mx::Shape{in}) return;
  refuse(function, "the norm's weight must be [" + std::to_string(in) + "], but got " +
                       std::to_string(norm->weight.size()) + " elements");
}

void check_residual(const char* function, const mx::array& residual, const mx::array& x, int out) {
  mx::Shape want = x.shape();
  want.back() = out;
  if (residual.shape() == want && mx::issubdtype(residual.dtype(), mx::floating)) return;
  refuse(function, "the residual must have x's shape with a last axis of " + std::to_string(out) + ", but got " +
                       (residual.ndim() == 0 ? "a scalar" : "a last axis of " + std::to_string(residual.shape(-1))));
}

// A map with what keeps its pointers alive.
struct HeldMap {
  AffineMapPtr map;
  cpu::Map view = {};
  std::vector<float> bias = {};
};

// Returns: whether the kernels can read it.
bool hold(const AffineMapPtr& map, HeldMap& held) {
  held.map = map;
  const auto view = internal::view_of(map->weight);
  if (!view) return false;
  held.view.weight = *view;
  if (map->bias) held.view.bias = internal::floats_of(*map->bias, held.bias);
  return !map->bias || held.view.bias;
}

bool hold(const std::optional<RmsNormParams>& norm, HeldNorm& held) {
  auto one = internal::held(norm);
  if (one) held = std::move(*one);
  return one.has_value();
}

bool kernels_take(const mx::array& x) { return internal::use_kernels() && internal::element_of(x.dtype()); }

mx::array empty_rows(const mx::array& x, int out) {
  mx::Shape shape = x.shape();
  shape.back() = out;
  return mx::zeros(shape, x.dtype());
}

class LinearOperation final : public RowsOperation {
 public:
  explicit LinearOperation(const char* name) : name_(name) {}

  bool hold_all(const std::vector<AffineMapPtr>& maps, const std::optional<RmsNormParams>& norm,
                const std::optional<RmsNormParams>& output_norm = {}) {
    maps_.resize(maps.size());
    for (std::size_t i = 0; i < maps.size(); ++i) {
      if (!hold(maps[i], maps_[i])) return false;
    }
    return hold(norm, norm_) && hold(output_norm, output_norm_);
  }

  const char* name() const override { return name_; }

  void run(const cpu::Rows& x, const float* residual, std::span<float* const> outputs,
           ThreadPool& pool) const override {
    std::vector<cpu::LinearOutput> parts;
    parts.reserve(maps_.size());
    for (std::size_t i = 0; i < maps_.size(); ++i)
      parts.push_back({maps_[i].view, residual, output_norm_.view(), outputs[i]});
    cpu::linear(x, norm_.view(), parts, pool);
  }

 private:
  const char* name_;
  std::vector<HeldMap> maps_;
  HeldNorm norm_;
  HeldNorm output_norm_;
};

class GatedMlpOperation final : public RowsOperation {
 public:
  bool hold_all(const AffineMapPtr& gate, const AffineMapPtr& up, const AffineMapPtr& down, GateActivation activation,
                const std::optional<RmsNormParams>& norm, const std::optional<RmsNormParams>& output_norm) {
    activation_ = activation == GateActivation::silu ? cpu::Activation::silu : cpu::Activation::gelu_tanh;
    return hold(gate, gate_) && hold(up, up_) && hold(down, down_) && hold(norm, norm_) &&
           hold(output_norm, output_norm_);
  }

  const char* name() const override { return "gated mlp"; }

  void run(const cpu::Rows& x, const float* residual, std::span<float* const> outputs,
           ThreadPool& pool) const override {
    cpu::gated_mlp(x, norm_.view(), {gate_.view, up_.view, down_.view, activation_, output_norm_.view()}, residual,
                   outputs[0], pool);
  }

 private:
  HeldMap gate_;
  HeldMap up_;
  HeldMap down_;
  cpu::Activation activation_ = cpu::Activation::silu;
  HeldNorm norm_;
  HeldNorm output_norm_;
};

class RmsNormOperation final : public RowsOperation {
 public:
  bool hold_all(const RmsNormParams& norm) { return hold(norm, norm_); }
  const char* name() const override { return "rms norm"; }
  void run(const cpu::Rows& x, const float*, std::span<float* const> outputs, ThreadPool& pool) const override {
    cpu::rms_norm(x, norm_.view(), outputs[0], pool);
  }

 private:
  HeldNorm norm_;
};

}  // namespace

std::vector<mx::array> linear(const mx::array& x, const std::vector<AffineMapPtr>& maps,
                              const std::optional<RmsNormParams>& norm) {
  std::vector<int> sizes;
  for (const AffineMapPtr& map : maps) {
    check_map("linear", map);
    check_input("linear", x, map->in());
    check_norm("linear", norm, map->in());
    sizes.push_back(map->out());
  }
  if (maps.empty()) return {};
  if (x.size() == 0) {
    std::vector<mx::array> none;
    for (const int size : sizes) none.push_back(empty_rows(x, size));
    return none;
  }
  auto operation = std::make_shared<LinearOperation>(norm ? "norm+linear" : "linear");
  if (!kernels_take(x) || !operation->hold_all(maps, norm)) return reference::linear(x, maps, norm);
  return internal::apply(std::move(operation), x, {}, sizes);
}

mx::array linear_add(const mx::array& x, const AffineMapPtr& map, const mx::array& residual,
                     const std::optional<RmsNormParams>& output_norm) {
  check_map("linear_add", map);
  check_input("linear_add", x, map->in());
  check_residual("linear_add", residual, x, map->out());
  check_norm("linear_add", output_norm, map->out());
  if (x.size() == 0) return empty_rows(x, map->out());
  auto operation = std::make_shared<LinearOperation>(output_norm ? "linear+norm+residual" : "linear+residual");
  if (!kernels_take(x) || !kernels_take(residual) || !operation->hold_all({map}, {}, output_norm)) {
    return reference::linear_add(x, map, residual, output_norm);
  }
  return internal::apply(std::move(operation), x, residual, {map->out()})[0];
}

mx::array gated_mlp(const mx::array& x, const AffineMapPtr& gate, const AffineMapPtr& up, const AffineMapPtr& down,
                    GateActivation activation, const std::optional<RmsNormParams>& norm,
                    const std::optional<mx::array>& residual, const std::optional<RmsNormParams>& output_norm) {
  for (const AffineMapPtr& map : {gate, up, down}) check_map("gated_mlp", map);
  check_input("gated_mlp", x, gate->in());
  check_input("gated_mlp", x, up->in());
  check_norm("gated_mlp", norm, gate->in());
  if (gate->out() != up->out() || gate->out() != down->in()) {
    refuse("gated_mlp", "gate and up must give what down takes, but got " + std::to_string(gate->out()) + ", " +
                            std::to_string(up->out()) + " and " + std::to_string(down->in()));
  }
  if (residual) check_residual("gated_mlp", *residual, x, down->out());
  check_norm("gated_mlp", output_norm, down->out());
  if (x.size() == 0) return empty_rows(x, down->out());
  auto operation = std::make_shared<GatedMlpOperation>();
  if (!kernels_take(x) || (residual && !kernels_take(*residual)) ||
      !operation->hold_all(gate, up, down, activation, norm, output_norm)) {
    return reference::gated_mlp(x, gate, up, down, activation, norm, residual, output_norm);
  }
  return internal::apply(std::move(operation), x, residual, {down->out()})[0];
}

mx::array rms_norm(const mx::array& x, const RmsNormParams& norm) {
  if (norm.weight.ndim() != 1) refuse("rms_norm", "the norm's weight must be [E], but got another rank");
  check_input("rms_norm", x, norm.weight.shape(0));
  if (x.size() == 0) return x;
  auto operation = std::make_shared<RmsNormOperation>();
  if (!kernels_take(x) || !operation->hold_all(norm)) return reference::rms_norm(x, norm);
  return internal::apply(std::move(operation), x, {}, {x.shape(-1)})[0];
}

}  // namespace reprise::kernels
