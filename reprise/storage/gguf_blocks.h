// Blocks of ggml's quantised types → MLX's affine layout (w = scale · q + bias, groups of 32 or 16 along a row). Plain
// pointers, no MLX. Private to storage.
//
// How exact: the q's are the file's. Scales and biases of the types without K are the file's, bit for bit. Those of the
// K types are products of a float16 and a whole number below 128. As float16 they are rounded once, to within 2^-11 of
// themselves (below float16's range of full precision they are exact: multiples of 2^-24, as the file's numbers are),
// so that a weight of 4 bits moves by less than 1/60 of a step of q. Beyond float16's range they are float32, and
// exact. Threads: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace reprise::internal {

// One row. `packed`: a little-endian stream of the q's. Scales and biases, one a group, are float16 bits
// (`float_scales` false) or floats.
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
  int group_size;
  // Returns: false when float16 does not hold a scale or bias as it should; the row is then not complete.
  bool (*convert_row)(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
};

// None for a type that has no affine form (or is not quantised at all).
std::optional<BlockFormat> block_format(std::uint32_t gguf_type);

}  // namespace reprise::internal
