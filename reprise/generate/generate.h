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
#include "reprise/generate/finish_reason.h"
#include "reprise/generate/kv_cache_options.h"
#include "reprise/generate/loaded_model.h"
#include "reprise/generate/recorded_cache.h"
#include "reprise/sampling/sampler.h"

namespace reprise {

struct GenerateStats {
  int prompt_tokens = 0;      // the whole prompt: cached and processed
  int cached_tokens = 0;      // not recomputed
  int completion_tokens = 0;  // the stop token included
  // Of GenerateOptions::verify_reuse.
  int reuse_checks = 0;
  int reuse_mismatches = 0;
  double reuse_error = 0;  // the largest, relative; see GenerateOptions
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
  // Quantises as it goes (refused before the prompt is processed where that cannot work), and says what an empty cache
  // is made of where the given one must be given up.
  KVCacheOptions kv_cache = {};
  // Part of the calls over a filled cache, 0 … 1, in which that cache is computed again from nothing, and the logits of
  // the next token are compared. On a mismatch (logged) the answer comes from the cold cache. They may differ by
  // max|warm - cold| / max|cold| = 1e-3 in float32, 5e-2 in narrower dtypes; over quantised layers by 2e-2 (8 bits),
  // 5e-2 (6, 5), 0.15 (4) or 0.3 (3, 2), if that is more.
  double verify_reuse = 0.0;
  std::stop_token cancel = {};  // looked at between prefill chunks and decode steps
  // Prefill progress: tokens processed of tokens to process; first (0, total), last (total, total).
  std::function<void(int done, int total)> on_progress = {};
  // Called when the cache holds all of the prompt but its last token.
  std::function<void()> on_prefilled = {};
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
// (empty prompt, bad options: before anything happens; a prompt id outside the vocabulary; a prompt that with
// max_tokens goes beyond the model's positions, unless kv_cache bounds the layers), corrupt_data (logits that are not
// numbers), and what MLX throws in evaluation, as internal or resource_exhausted.
GenerateResult generate(const LoadedModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
                        const GenerateOptions& options = {});

// The building block below it, without text: prefills all but the last token of `prompt` in chunks.
void prefill(const LanguageModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
             const GenerateOptions& options = {});

}  // namespace reprise
