// The head of a safetensors file as text. Private to storage.
// Threads: free functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "mlx/dtype.h"
#include "reprise/storage/safetensors.h"

namespace reprise::internal {

// Bits of one item of safetensors' dtype, none for a word that is no dtype.
std::optional<std::uint64_t> safetensors_item_bits(std::string_view dtype);

// None for a dtype that MLX has not.
std::optional<mlx::core::Dtype> mlx_dtype(std::string_view safetensors_dtype);
std::string safetensors_dtype(mlx::core::Dtype dtype);

// All bytes before the data section: length, JSON, padding. Throws: invalid_argument (not UTF-8).
std::string encode_safetensors_header(const SafetensorsHeader& header);

}  // namespace reprise::internal
