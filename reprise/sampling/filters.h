// The filters of sampling: each sets the logprobs of the tokens it drops to -infinity and leaves the others as they
// are. Meaning and names are mlx-lm's. A row never loses its likeliest token. Threads: free functions; results are
// unevaluated arrays of the calling thread.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

// All take logprobs [B, V], float32, and return the same shape. Arguments are taken as check_sampling_params passes
// them.

// Keeps the smallest set of likeliest tokens whose mass reaches top_p of the row's mass; 0 and 1 keep all.
mlx::core::array apply_top_p(const mlx::core::array& logprobs, float top_p);

// Keeps tokens at least min_p times as likely as the row's likeliest, and the min_tokens_to_keep likeliest in any case.
mlx::core::array apply_min_p(const mlx::core::array& logprobs, float min_p, int min_tokens_to_keep = 1);

// Throws: invalid_argument for an id outside [0, vocab_size), in the name of apply_xtc.
void check_special_tokens(const std::vector<TokenId>& ids, int vocab_size);

// Of the tokens more likely than `threshold`, keeps only the least likely; less likely tokens and `special_tokens`
// stay. Throws: invalid_argument for a special token outside the vocabulary.
mlx::core::array apply_xtc(const mlx::core::array& logprobs, float threshold,
                           const std::vector<TokenId>& special_tokens = {});

// Keeps the k likeliest (of equals, any); 0 and k ≥ V keep all.
mlx::core::array apply_top_k(const mlx::core::array& logprobs, int top_k);

// Those that `params` turns on, in mlx-lm's order: top-p, min-p, XTC, top-k. XTC acts on row b where xtc_rows[b] is
// set; an empty vector: on none.
mlx::core::array apply_filters(const mlx::core::array& logprobs, const SamplingParams& params,
                               const std::vector<bool>& xtc_rows);

}  // namespace reprise
