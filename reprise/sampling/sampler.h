// From logits to the next token.
// Threads: a Sampler belongs to one thread at a time; results are unevaluated arrays of the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mlx/array.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

// logprobs [B, V] (normalised, float32) → token ids int32 [B].
using Sampler = std::function<mlx::core::array(const mlx::core::array& logprobs)>;

// Top-k, top-p, min-p, XTC in mlx-lm's order, then temperature and a draw; argmax at temperature 0. Draws depend on
// (seed, number of draws so far) alone: no process-wide state, no graph that grows.
// `num_draws` is where to go on, for a session that is restored.
// Throws: invalid_argument (check_sampling_params).
Sampler make_sampler(const SamplingParams& params, std::uint64_t num_draws = 0);

// One change of the logits before sampling.
struct LogitsProcessor {
  int context_size = 0;  // how many of the most recent tokens (prompt included) apply wants; 0: none
  // context int32 [T], T ≤ context_size, most recent last; logits [B, V] → [B, V].
  std::function<mlx::core::array(const mlx::core::array& context, const mlx::core::array& logits)> apply;
};

// Logit bias, then repetition, presence and frequency penalties; only those that are on.
// Throws: invalid_argument (check_sampling_params).
std::vector<LogitsProcessor> make_logits_processors(const SamplingParams& params);

}  // namespace reprise
