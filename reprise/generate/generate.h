// Prefill and decode of one sequence over a prompt cache.
// Threads: a call evaluates on the calling thread; `cancel` may be requested from any thread (or a signal handler,
// through an atomic the caller polls in `on_token`).
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/generate/loaded_model.h"
#include "reprise/sampling/sampler.h"

namespace reprise {

// A prompt cache and the ids of the tokens it holds. Invariant, at every exit of every function here: tokens.size() is
// the cache's position, and row i holds tokens[i].
struct RecordedCache {
  PromptCache cache;
  Tokens tokens;

  RecordedCache fork() const { return {cache.fork(), tokens}; }
};

// Brings `cache` to the longest prefix it shares with `ids` that can be kept, at least one token short of `ids`: that
// one is computed for its logits. A cache that cannot be cut back that far becomes an empty one of the model's own
// kinds. Requires: ids is not empty.
void keep_common_prefix(const LanguageModel& model, RecordedCache& cache, std::span<const TokenId> ids);

enum class FinishReason { stop, length, cancelled };
std::string_view to_string(FinishReason reason);

struct GenerateStats {
  int prompt_tokens = 0;      // the whole prompt: cached and processed
  int cached_tokens = 0;      // not recomputed
  int completion_tokens = 0;  // the stop token included
  std::chrono::duration<double> time_to_first_token{0};
  std::chrono::duration<double> prefill_time{0};
  std::chrono::duration<double> decode_time{0};
  // Tokens per second; 0 when nothing was processed.
  double prefill_tps() const;
  double decode_tps() const;
};

struct GenerateOptions {
  int max_tokens = 256;  // ≥ 0; 0 only processes the prompt
  SamplingParams sampling = {};
  std::uint64_t num_draws = 0;            // see make_sampler
  std::vector<TokenId> stop_tokens = {};  // in addition to the tokenizer's end-of-answer ids
  bool ignore_eos = false;                // the tokenizer's ids do not stop (benchmarks)
  std::vector<std::string> stop = {};     // matched on the text; held back until certain; not part of the text
  // Tokens per prefill chunk, ≥ 1. None: 2048 on a GPU, 256 on the CPU, where a chunk is seconds of work and cancel and
  // progress are to answer between chunks. Results do not depend on it.
  std::optional<int> prefill_step_size = {};
  std::stop_token cancel = {};  // looked at between prefill chunks and decode steps
  // Prefill progress: tokens processed of tokens to process; first (0, total), last (total, total).
  std::function<void(int done, int total)> on_progress = {};
  // Text as it becomes certain; pieces joined are the result's text.
  std::function<void(std::string_view)> on_text = {};
};

struct GenerateResult {
  std::string text;  // without stop strings and special tokens
  Tokens tokens;     // sampled ids, a stop token included
  FinishReason finish_reason = FinishReason::length;
  GenerateStats stats;
};

// Processes `prompt` (only the given tokens; positions go on at the cache's) and samples up to max_tokens. Works over
// any cache: two calls over one cache equal one call over the joined prompt. On every exit, exceptions included,
// `cache` keeps its invariant; after an exception from prefill it holds what was processed. Throws: invalid_argument
// (empty prompt, bad options: before anything happens; a prompt id outside the vocabulary), corrupt_data (logits that
// are not numbers), and what MLX throws in evaluation, as internal or resource_exhausted.
GenerateResult generate(const LoadedModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
                        const GenerateOptions& options = {});

// The building block below it, without text: prefills all but the last token of `prompt` in chunks.
void prefill(const LanguageModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
             const GenerateOptions& options = {});

}  // namespace reprise
