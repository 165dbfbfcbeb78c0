// Blocks of ggml's quantised types → MLX's affine layout (w = scale · q + bias, groups of 32 along a row), bit for bit
// the same weights; types with groups of 16 → float16. Plain pointers, no MLX. Private to storage.
// Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace reprise::internal {

inline constexpr std::int64_t kGroupSize = 32;

// One row. `packed`: bits bytes·4 per group, a little-endian stream of the q's. Scales and biases, one a group, are
// float16 bits (`float_scales` false) or floats.
struct AffineRow {
  std::uint32_t* packed;
  void* scales;
  void* biases;
  bool float_scales;
};

struct BlockFormat {
  std::int64_t block_items;
  std::int64_t block_bytes;
  int bits;
  // The scales are products of two numbers, which float16 cannot hold.
  bool needs_float_scales;
  // Returns: false when a scale or bias does not fit float16 exactly; the row is then not complete.
  bool (*convert_row)(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
};

// None for a type that has no exact affine form in groups of 32 (or is not quantised at all).
std::optional<BlockFormat> block_format(std::uint32_t gguf_type);

struct FloatFormat {
  std::int64_t block_items;
  std::int64_t block_bytes;
  void (*convert_row)(const std::byte* blocks, std::int64_t num_blocks, float* out);
};

// None for a type that is not unpacked.
std::optional<FloatFormat> float_format(std::uint32_t gguf_type);

}  // namespace reprise::internal
