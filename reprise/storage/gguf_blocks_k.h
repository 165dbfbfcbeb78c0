// K blocks of 256 weights, see gguf_blocks.h. Private to storage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reprise/storage/gguf_blocks.h"

namespace reprise::internal {

bool convert_q2_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
bool convert_q3_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
bool convert_q4_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
bool convert_q5_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);
bool convert_q6_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row);

}  // namespace reprise::internal
