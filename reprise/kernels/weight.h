// Weight matrices as models store them.
// Threads: values; arrays follow MLX's rule (an unevaluated array belongs to the thread that built it).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "mlx/array.h"

namespace reprise {

// MLX's affine quantisation along the input axis: w = scale · q + bias per group.
struct QuantizedWeight {
  mlx::core::array packed;  // uint32 [out, in * bits / 32]
  mlx::core::array scales;  // [out, in / group_size]
  mlx::core::array biases;  // [out, in / group_size]
  int group_size = 64;      // 32, 64 or 128; 16 as affine_format.h says
  int bits = 4;             // 2, 3, 4, 5, 6 or 8
  bool centred = false;     // is_centred: kernels that are bound by memory then leave the biases unread
};
// Whether every bias is -2^(bits - 1) times its scale, to the bit: what symmetric types become, as GGUF's. Looks at
// memory of the CPU, evaluating it; elsewhere, and with empty or strided arrays, the answer is no.
bool is_centred(const QuantizedWeight& weight);

// Narrow floats with a narrow scale per group, as MLX packs them (OCP Microscaling Formats 1.0; NVIDIA's NVFP4).
enum class MicroscalingFormat {
  mxfp4,  // e2m1, scales e8m0 for groups of 32
  mxfp8,  // e4m3, scales e8m0 for groups of 32
  nvfp4,  // e2m1, scales e4m3 for groups of 16
};
inline constexpr std::array kMicroscalingFormats = {MicroscalingFormat::mxfp4, MicroscalingFormat::mxfp8,
                                                    MicroscalingFormat::nvfp4};
// None for another name.
std::optional<MicroscalingFormat> find_microscaling_format(std::string_view name);
int group_size_of(MicroscalingFormat format);
int bits_of(MicroscalingFormat format);
const char* name_of(MicroscalingFormat format);  // as config.json and MLX call it

// w = scale · value per group along the input axis.
struct MicroscaledWeight {
  mlx::core::array packed;  // uint32 [out, in * bits / 32]
  mlx::core::array scales;  // uint8 [out, in / group_size]
  MicroscalingFormat format = MicroscalingFormat::mxfp4;
};

using DenseWeight = mlx::core::array;  // [out, in]
using Weight = std::variant<DenseWeight, QuantizedWeight, MicroscaledWeight>;

// Of one matrix, or of each of a stack.
int inputs_of(const Weight& weight);
int outputs_of(const Weight& weight);

// Applies `change` to each of a weight's arrays, each of which has the same axes but the last: rows, experts.
template <typename Change>
Weight with_each_array(const Weight& weight, const Change& change) {
  if (const auto* q = std::get_if<QuantizedWeight>(&weight)) {
    return QuantizedWeight{change(q->packed), change(q->scales), change(q->biases), q->group_size, q->bits, q->centred};
  }
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    return MicroscaledWeight{change(m->packed), change(m->scales), m->format};
  }
  return change(std::get<DenseWeight>(weight));
}

// An affine map y = x · weightᵀ + bias. Immutable, shared by a layer and the unevaluated operations that use it.
struct AffineMap {
  Weight weight;
  std::optional<mlx::core::array> bias = {};  // [out]

  int in() const { return inputs_of(weight); }
  int out() const { return outputs_of(weight); }
};
using AffineMapPtr = std::shared_ptr<const AffineMap>;

}  // namespace reprise
