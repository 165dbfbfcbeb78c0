// Attention over quantised keys and values; scaled_dot_product_attention comes here for QuantizedKV. Private to nn.
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include "mlx/array.h"
#include "reprise/nn/attention.h"
#include "reprise/nn/keys_values.h"

namespace reprise::internal {

// Lowest value that masking adds to or puts in place of a score of this dtype: finite even after a score is added, so
// that the softmax of a row of nothing else is finite.
mlx::core::array masked_score(mlx::core::Dtype dtype);

// See scaled_dot_product_attention. Sums and softmax are float32 whatever the queries' dtype, and on the CPU so is all
// in between. Keys and values are never repeated over the heads of a group (with packed numbers that are broadcast,
// MLX 0.32.4's CUDA products are wrong); they are unpacked, for the time of a product, only on the CPU, where the
// options let it, it is faster and takes no large memory.
mlx::core::array quantized_attention(const mlx::core::array& queries, const QuantizedKV& keys_values,
                                     const AttentionScoreOptions& options);

}  // namespace reprise::internal
