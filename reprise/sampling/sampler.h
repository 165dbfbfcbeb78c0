// From logits to the next token.
// Threads: a Sampler belongs to one thread at a time; results are unevaluated arrays of the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mlx/array.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

// logprobs [B, V] (normalised, float32) → token ids int32 [B]. Only builds the graph: nothing is evaluated.
// Throws: invalid_argument for another rank or V = 0.
using Sampler = std::function<mlx::core::array(const mlx::core::array& logprobs)>;

// Top-p, min-p, XTC, top-k (mlx-lm's order, filters.h), then temperature and a draw; argmax at temperature 0. The draw
// of a row depends on (seed, number of calls so far, row) alone: no process-wide state, no graph that grows.
// `num_draws` is the number of calls to start from, for a session that is restored. A copy of a Sampler goes on by
// itself from where the original was. Throws: invalid_argument (check_sampling_params).
Sampler make_sampler(const SamplingParams& params, std::uint64_t num_draws = 0);

struct SampledTokens {
  mlx::core::array tokens;    // int32 [B]
  mlx::core::array logprobs;  // float32 [B]: of those tokens, before filters and temperature
};

// logits [..., V] of any floating dtype, B rows → tokens. A logprob is not a number where its row is damaged (NaN,
// +infinity, nothing but -infinity). Only builds the graph. Throws: invalid_argument for V = 0.
using LogitsSampler = std::function<SampledTokens(const mlx::core::array& logits)>;

// What make_sampler's Sampler does with the logits' log-softmax, as one operation on a CPU. For a seed both draw the
// same tokens, but where a number falls within rounding of the border between two.
LogitsSampler make_logits_sampler(const SamplingParams& params, std::uint64_t num_draws = 0);

// One change of the logits before sampling.
struct LogitsProcessor {
  int context_size = 0;  // how many of the most recent tokens (prompt included) apply wants; 0: none
  // context int32 [T], most recent last, ids in [0, V); more than context_size are cut. logits [B, V] → [B, V], the
  // same dtype, unevaluated. Throws: invalid_argument for a logit bias outside the vocabulary.
  std::function<mlx::core::array(const mlx::core::array& context, const mlx::core::array& logits)> apply;
};

// Logit bias, then repetition, presence and frequency penalties; only those that are on.
// Throws: invalid_argument (check_sampling_params).
std::vector<LogitsProcessor> make_logits_processors(const SamplingParams& params);

}  // namespace reprise
