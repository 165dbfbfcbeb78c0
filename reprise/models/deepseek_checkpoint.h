// How DeepSeek's and Kimi's original checkpoints lay weights out, brought to mlx-lm's layout. Private to `models`.
#pragma once

#include <string>

#include "reprise/models/config.h"
#include "reprise/models/deepseek_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

// As Config::quantization_overrides, but none for the methods that to_mlx_layout undoes: fp8, compressed-tensors.
QuantizationOverrides deepseek_quantization(const Config& config);

// Drops layers that only predict further tokens; dequantises fp8 in blocks; repacks int4; stacks experts.
// Throws: corrupt_data for tensors that do not fit, unsupported for other numbers of bits.
void to_mlx_layout(WeightReader& weights, const Config& config);

// `path`.kv_b_proj, if it is there, becomes `path`.embed_q and `path`.unembed_out, quantised as it was.
// Throws: corrupt_data for another shape.
void split_kv_b_proj(WeightReader& weights, const std::string& path, const LatentSizes& sizes);

}  // namespace reprise::internal
