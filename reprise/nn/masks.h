// Attention masks as bool arrays, true = may attend: a query at position q sees keys k ≤ q, and with a window w only
// those with k > q - w. Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

struct CausalMaskOptions {
  std::optional<int> window = {};                      // ≥ 1: keys q - window < k ≤ q only
  std::optional<mlx::core::array> right_padding = {};  // int32 [B]: columns after a row's last real token
  std::optional<mlx::core::array> left_padding = {};   // int32 [B]: columns before a row's first real token
};

// Query i (of N) sits at offset + i; key columns are 0 … offset + N - 1.
// Returns: bool [N, offset + N], or [B, 1, N, offset + N] with any padding.
// Throws: invalid_argument for N < 1, offset < 0 or window < 1.
mlx::core::array create_causal_mask(int N, int offset = 0, const CausalMaskOptions& options = {});

// Which of `columns` keys lie in the same chunk of the sequence as each of N queries, which are the last N of them;
// chunks begin at the multiples of chunk_size. Column 0 is at position `first`, of each row's own where it is an array;
// columns below position 0 say nothing. Returns: bool [N, columns], or [B, 1, N, columns]. Throws: invalid_argument for
// N < 1, columns < N or chunk_size < 1.
mlx::core::array create_same_chunk_mask(int N, int columns, const Offset& first, int chunk_size);

struct AttentionMaskOptions {
  bool return_array = false;
  std::optional<int> window = {};
};

// The mask for N new tokens after `offset` stored ones, all of which stay visible unless a window is given: NoMask for
// one token without a window; an array with `return_array` or a window; else Causal. Throws: as create_causal_mask.
Mask create_attention_mask(int N, int offset, const AttentionMaskOptions& options = {});

// The mask for N tokens that no cache precedes: NoMask for one token; an array with `return_array` or when the window
// is shorter than N; else Causal. Throws: as create_causal_mask.
Mask create_attention_mask_without_cache(int N, const AttentionMaskOptions& options = {});

}  // namespace reprise
