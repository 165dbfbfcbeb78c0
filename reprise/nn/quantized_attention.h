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

// See scaled_dot_product_attention. Scores, softmax and sums are float32 whatever the queries' dtype. Keys and values
// are never repeated over the heads of a group; they are unpacked, to float32 and for the time of the product, only
// where the options let it, it is faster and takes no large memory.
mlx::core::array quantized_attention(const mlx::core::array& queries, const QuantizedKV& keys_values,
                                     const AttentionScoreOptions& options);

}  // namespace reprise::internal
