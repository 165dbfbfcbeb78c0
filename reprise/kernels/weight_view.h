// A stored weight as the CPU kernels take it. Private to `kernels`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/kernels/cpu.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/linear_cpu.h"
#include "reprise/kernels/weight.h"

namespace reprise::kernels::internal {

// "[2, 3]", for messages.
std::string text(const mlx::core::Shape& shape);
[[noreturn]] void refuse(const char* function, const std::string& what);  // invalid_argument

// None for a dtype that the kernels do not know.
std::optional<cpu::Element> element_of(mlx::core::Dtype dtype);

// Shape, dtypes and layout agree. Throws: invalid_argument, naming `function`, where they do not.
// `axes`: 2, or 3 for matrices stacked along a first axis.
void check_weight(const char* function, const Weight& weight, std::size_t axes = 2);

// A vector as float32: itself, or copied into `storage`. Evaluates it if it is not. Null for a dtype or layout that the
// kernels cannot read. Both must outlive what is returned.
const float* floats_of(const mlx::core::array& vector, std::vector<float>& storage);

// A norm with what keeps its weight alive.
struct HeldNorm {
  std::optional<RmsNormParams> params = {};
  std::shared_ptr<const std::vector<float>> wide = {};  // the weight, where it is stored narrower than float32
  const float* weight = nullptr;

  cpu::Norm view() const { return weight != nullptr ? cpu::Norm{weight, params->eps} : cpu::Norm{}; }
};
// Evaluates the weight if it is not. No norm is held as none. Nothing for one that the kernels cannot read.
std::optional<HeldNorm> held(const std::optional<RmsNormParams>& norm);

// Evaluates the weight if it is not. None for one that the kernels cannot read: another dtype, or not row-contiguous.
// Requires: a weight that check_weight lets pass; it must outlive the view.
// Stacked matrices are one of all their rows.
std::optional<cpu::WeightView> view_of(const Weight& weight);

}  // namespace reprise::kernels::internal
