// What caches cost, by MLX's allocator and the addresses of evaluated buffers.
// Threads: free functions.
#pragma once

#include <cstddef>
#include <variant>

#include "mlx/memory.h"
#include "mlx/transforms.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::cache_test {

// Bytes that live arrays hold, MLX's pool of freed buffers left out.
inline std::size_t active_bytes() {
  mlx::core::synchronize();
  return mlx::core::get_active_memory();
}

// Address of the key buffer; the view is dropped before the next write.
inline const void* key_buffer(const AttentionCache& cache) {
  const KeysValues all = cache.keys_and_values();
  mlx::core::array keys =
      std::holds_alternative<DenseKV>(all) ? std::get<DenseKV>(all).keys : std::get<QuantizedKV>(all).keys.packed;
  keys.eval();
  return keys.data<char>();
}

}  // namespace reprise::cache_test
