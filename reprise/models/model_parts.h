// What every architecture does in the same way. Private to `models`.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/models/config.h"
#include "reprise/models/language_model.h"
#include "reprise/models/weight_reader.h"
#include "reprise/nn/rope.h"

namespace reprise::internal {

// Before a forward changes anything. Throws: invalid_argument for tokens that are not int [B, L] with L ≥ 1, evaluated
// ids outside [0, V), or a cache of another number of layers or kinds.
void check_forward(const mlx::core::array& tokens, const PromptCache& cache, std::size_t num_layers, int vocab_size);

// The dtype of `options`, or what it leaves open. Throws: invalid_argument for one that is not float32, float16 or
// bfloat16.
mlx::core::Dtype compute_dtype(const ModelOptions& options, const WeightMap& weights);

// As compute_dtype, for the stored keys and values.
mlx::core::Dtype kv_dtype(const ModelOptions& options, mlx::core::Dtype compute);

// The scaling of `rope`, or, where the weights carry GGUF's rope factors, a scaling by them.
std::optional<RopeScaling> with_freq_factors(const RopeOptions& rope, WeightReader& weights);

ModelInfo model_info(const Config& config, const WeightReader& weights);

}  // namespace reprise::internal
