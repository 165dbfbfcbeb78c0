// From a row of logits to the next token: what sampling does with a whole vocabulary, without sorting it. CPU kernels;
// on a GPU likeliest and log_softmax are made of MLX's operations, and sampling makes draw of them itself.
// Threads: results are unevaluated arrays of the calling thread.
#pragma once

#include <vector>

#include "mlx/array.h"

namespace reprise::kernels {

struct Selection {
  mlx::core::array tokens;    // int32 [B]
  mlx::core::array logprobs;  // float32 [B]: of those tokens, before filters and temperature
};

// The likeliest token of each row, of equals the first. logits [..., V] of any floating dtype, V ≥ 1: B rows, in order.
// A logprob is not a number where the row holds a NaN, +infinity, or nothing but -infinity.
Selection likeliest(const mlx::core::array& logits);

// logits [..., V] → the same shape, float32.
mlx::core::array log_softmax(const mlx::core::array& logits);

// Meaning and order as sampling/filters.h has them: top-p, min-p, XTC, top-k on the logprobs, then temperature.
struct DrawParams {
  float temperature = 1.0f;  // > 0
  float top_p = 1.0f;        // 0 and 1 keep all
  float min_p = 0.0f;        // 0 keeps all
  int min_tokens_to_keep = 1;
  int top_k = 0;  // 0 keeps all; of equals the first stay
  float xtc_threshold = 0.1f;
  std::vector<int> xtc_special_tokens = {};
};

// Draws a token from each row: the first, in the order of ids, at which the kept tokens' cumulated mass exceeds
// uniforms[b] of the whole. XTC acts on row b where xtc_rows[b] is set (empty: on none). logits as above.
// Requires: a CPU; B uniforms in [0, 1); special tokens in [0, V).
Selection draw(const mlx::core::array& logits, const DrawParams& params, std::vector<float> uniforms,
               std::vector<bool> xtc_rows = {});

// Whether draw may be called: arrays live on the CPU.
bool can_draw();

}  // namespace reprise::kernels
