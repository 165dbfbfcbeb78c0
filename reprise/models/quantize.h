// Makes a quantised model of a dense one: what `mlx_lm.convert -q` does, for every architecture that make_model knows.
// Threads: free functions; arrays come back unevaluated and belong to the calling thread.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "mlx/dtype.h"
#include "reprise/nn/weight.h"
#include "reprise/storage/model_files.h"

namespace reprise {

struct QuantizeOptions {
  int bits = 4;         // affine: 2, 3, 4, 5, 6 or 8
  int group_size = 64;  // affine: 32, 64 or 128
  // In place of the two above, which it fixes.
  std::optional<MicroscalingFormat> format = {};
  // Of what stays dense and of scales. None: as stored.
  std::optional<mlx::core::Dtype> dtype = {};
};

struct QuantizedModel {
  std::string config_json;  // with `quantization` (and `quantization_config`), as mlx-lm writes it
  WeightMap weights;        // by mlx-lm's names
  std::size_t num_parameters = 0;
  double bits_per_weight = 0;
};

// Quantises each linear map, embedding and stack of experts whose inputs the group size divides; routers get 8 bits in
// groups of 64, since a wrong expert costs more than their few bytes. Throws: invalid_argument (bits or a group size
// that MLX does not know; nothing that can be quantised), failed_precondition (the model is quantised already), and
// what make_model throws.
QuantizedModel quantize_model(const ModelFiles& files, const QuantizeOptions& options);

}  // namespace reprise
