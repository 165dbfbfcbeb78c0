// Invariant of this file: whatever leaves a function, by return or by exception, leaves RecordedCache with as many
// tokens as rows. Rows run ahead of the record only between building a step and reading its token.
#include "reprise/generate/generate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/generate/answer_text.h"
#include "reprise/generate/request_checks.h"
#include "reprise/generate/reuse_check.h"
#include "reprise/generate/steps.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

using Clock = std::chrono::steady_clock;
using internal::as_row;
using internal::CacheQuantizer;

// MLX reports by plain std exceptions, when a graph is built and again when it is evaluated.
template <typename Work>
auto with_mlx_errors(Work work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource_exhausted, "[generate] out of memory");
  } catch (const std::exception& error) {
    throw Error(ErrorCode::internal, std::string("[generate] MLX: ") + error.what());
  }
}

// Adds to the record what has just been fed in one piece.
void record(RecordedCache& cache, std::span<const TokenId> piece) {
  cache.tokens.insert(cache.tokens.end(), piece.begin(), piece.end());
  cache.pieces.push_back(static_cast<int>(piece.size()));
}

// Drops the rows that the record does not know; where that fails, everything.
void restore_invariant(const LanguageModel& model, RecordedCache& cache, const KVCacheOptions& options) {
  const int recorded = static_cast<int>(cache.tokens.size());
  try {
    for (std::size_t i = 0; i < cache.cache.size(); ++i) {
      LayerCache& layer = cache.cache[i];
      const int ahead = layer.position().value_or(recorded) - recorded;
      if (ahead > 0) layer.trim(ahead);
    }
    cache.cache.eval();
    check_prompt_cache(cache.cache, recorded);
  } catch (const std::exception&) {
    cache = {make_prompt_cache(model, options.max_kv_size), {}};
  }
}

// All or nothing: what throws while the graph is built leaves every layer as it was, also those that cannot trim. The
// copy of the handles is gone before anything is evaluated, so it does not keep MLX from writing in place.
mx::array forward(const LanguageModel& model, const mx::array& tokens, PromptCache& cache, CacheQuantizer& quantize) {
  PromptCache before = cache.fork();
  try {
    auto logits = model.forward(tokens, cache);
    quantize(cache);
    return logits;
  } catch (...) {
    cache = std::move(before);
    throw;
  }
}

void check_arguments(const LanguageModel& model, std::span<const TokenId> prompt, const RecordedCache& cache,
                     const GenerateOptions& options) {
  const auto refuse = [](const std::string& what) { throw Error(ErrorCode::invalid_argument, "[generate] " + what); };
  if (const auto objection = internal::prompt_objection(model, prompt)) refuse(*objection);
  if (options.max_tokens < 0) refuse("max_tokens must not be negative, but got " + std::to_string(options.max_tokens));
  if (options.prefill_step_size && *options.prefill_step_size < 1) {
    refuse("prefill_step_size must be at least 1, but got " + std::to_string(*options.prefill_step_size));
  }
  if (!(options.verify_reuse >= 0.0 && options.verify_reuse <= 1.0)) {
    refuse("verify_reuse must lie in [0, 1], but got " + std::to_string(options.verify_reuse));
  }
  check_kv_cache_options(options.kv_cache);
  check_prompt_cache(cache.cache, static_cast<int>(cache.tokens.size()));
  // Refuses now what would fail when the cache comes to the start of quantisation.
  if (options.kv_cache.kv_bits) plan_kv_cache(model, cache.cache, options.kv_cache);
}

// A bounded cache says that its owner wants to go on beyond the model's positions all the same.
void check_positions(const LanguageModel& model, std::size_t prompt_tokens, int max_tokens, const KVCacheOptions& kv) {
  if (kv.max_kv_size) return;
  const auto objection = internal::positions_objection(model, prompt_tokens, max_tokens);
  if (!objection) return;
  throw Error(ErrorCode::invalid_argument,
              "[generate] " + *objection +
                  ": shorten it, lower max_tokens (--max-tokens), or keep only the most recent tokens with max_kv_size "
                  "(--max-kv-size)");
}

// Returns: whether all of `tokens` was processed (false: cancelled). Progress is told against `total`.
bool prefill_all(const LanguageModel& model, std::span<const TokenId> tokens, RecordedCache& cache,
                 const GenerateOptions& options, int total) {
  const auto step = static_cast<std::size_t>(internal::prefill_step_size(options));
  CacheQuantizer quantize(options.kv_cache);
  if (options.on_progress) options.on_progress(0, total);
  for (std::size_t done = 0; done < tokens.size();) {
    if (options.cancel.stop_requested()) return false;
    const auto chunk = tokens.subspan(done, std::min(step, tokens.size() - done));
    with_mlx_errors([&] {
      // The logits are never read, hence never computed: only the caches are evaluated.
      forward(model, as_row(chunk), cache.cache, quantize);
      cache.cache.eval();
    });
    record(cache, chunk);
    done += chunk.size();
    if (options.on_progress) options.on_progress(static_cast<int>(done), total);
  }
  return true;
}

// One token in, one sampled token out, all of it lazy.
class Stepper {
 public:
  Stepper(const LanguageModel& model, RecordedCache& cache, const GenerateOptions& options)
      : model_(model),
        cache_(cache),
        quantize_(options.kv_cache),
        sampler_(make_logits_sampler(options.sampling, options.num_draws)),
        processors_(make_logits_processors(options.sampling)) {}

  // token int32 [1, 1], not yet in the record.
  SampledTokens operator()(const mx::array& token) {
    return with_mlx_errors([&] {
      auto logits = forward(model_, token, cache_.cache, quantize_);
      if (!processors_.empty()) logits = mx::astype(mx::reshape(logits, {1, -1}), mx::float32);
      for (const LogitsProcessor& processor : processors_) {
        logits = processor.apply(context(processor.context_size, token), logits);
      }
      return sampler_(logits);
    });
  }

 private:
  // The most recent `size` tokens, `token` being the last.
  mx::array context(int size, const mx::array& token) const {
    if (size <= 0) return mx::zeros({0}, mx::int32);
    const Tokens& record = cache_.tokens;
    const std::size_t known = std::min(record.size(), static_cast<std::size_t>(size - 1));
    const auto last = mx::reshape(token, {1});
    if (known == 0) return last;
    const mx::array before(record.data() + (record.size() - known), {static_cast<int>(known)}, mx::int32);
    return mx::concatenate({before, last}, 0);
  }

  const LanguageModel& model_;
  RecordedCache& cache_;
  CacheQuantizer quantize_;
  LogitsSampler sampler_;
  std::vector<LogitsProcessor> processors_;
};

// The answer as far as it has come: in the result, and to who listens.
class Answer {
 public:
  Answer(const LoadedModel& model, const GenerateOptions& options, GenerateResult& result)
      : text_(model.tokenizer,
              {.stop_tokens = options.stop_tokens, .ignore_eos = options.ignore_eos, .stop = options.stop}),
        on_text_(options.on_text),
        result_(result) {}

  // Returns: whether the answer ends with this token.
  bool add(TokenId token) {
    result_.tokens.push_back(token);
    const AnswerText::Piece piece = text_.add(token);
    emit(piece.text);
    return piece.ended;
  }

  void finish() { emit(text_.finish()); }

 private:
  void emit(const std::string& text) {
    if (text.empty()) return;
    result_.text += text;
    if (on_text_) on_text_(text);
  }

  AnswerText text_;
  const std::function<void(std::string_view)>& on_text_;
  GenerateResult& result_;
};

// Samples up to max_tokens after `last`, the prompt's last token. While one step runs, the graph of the next is built
// on its result; it is dispatched as soon as that result is there and before the host reads it. Dispatching it earlier
// would make MLX copy the key/value buffers, which the running step still holds.
void decode(const LanguageModel& model, TokenId last, RecordedCache& cache, const GenerateOptions& options, int total,
            Clock::time_point started, Answer& answer, GenerateResult& result) {
  Stepper step(model, cache, options);
  SampledTokens sample = step(as_row(std::span(&last, 1)));
  with_mlx_errors([&] { mx::async_eval(sample.tokens, sample.logprobs); });
  record(cache, std::span(&last, 1));

  auto& stats = result.stats;
  Clock::time_point first_token;
  for (int n = 1;; ++n) {
    std::optional<SampledTokens> next;
    if (n < options.max_tokens) next = step(mx::reshape(sample.tokens, {1, 1}));
    with_mlx_errors([&] {
      mx::eval(sample.tokens, sample.logprobs);
      if (next) mx::async_eval(next->tokens, next->logprobs);
    });
    if (std::isnan(sample.logprobs.item<float>())) {
      throw Error(ErrorCode::corrupt_data, "[generate] the model's logits are not numbers: its weights are damaged");
    }
    const TokenId id = sample.tokens.item<std::int32_t>();
    // The step just dispatched stores this token's row, delivered or not.
    if (next) record(cache, std::span(&id, 1));
    if (n == 1) {
      first_token = Clock::now();
      stats.time_to_first_token = stats.prefill_time = first_token - started;
      if (options.on_progress) options.on_progress(total, total);
    }
    const bool stopped = answer.add(id);
    stats.completion_tokens = n;
    stats.decode_time = Clock::now() - first_token;
    if (stopped) {
      result.finish_reason = FinishReason::stop;
      break;
    }
    if (!next) break;
    if (options.cancel.stop_requested()) {
      result.finish_reason = FinishReason::cancelled;
      break;
    }
    sample = *next;
  }
  answer.finish();
  with_mlx_errors([&] { cache.cache.eval(); });
}

// The whole prompt but its last token is cached: is what was reused of it right? On a mismatch `cache` becomes what a
// cold run gives. Returns: false when cancelled.
bool verify_reuse(const LanguageModel& model, TokenId last, RecordedCache& cache, const GenerateOptions& options,
                  GenerateStats& stats) {
  auto check = with_mlx_errors([&] { return internal::check_reuse(model, cache, last, options); });
  if (!check) return false;
  ++stats.reuse_checks;
  stats.reuse_error = std::max(stats.reuse_error, check->error);
  if (check->agrees()) return true;
  ++stats.reuse_mismatches;
  log(LogLevel::warning, "[generate] the reused cache of " + std::to_string(cache.tokens.size()) +
                             " tokens differs from a cold run: logits by " + std::to_string(check->error) +
                             ", allowed " + std::to_string(check->tolerance) + "; the answer comes from the cold run");
  cache.cache = std::move(check->cold);
  return true;
}

}  // namespace

double GenerateStats::prefill_tps() const {
  return prefill_time.count() > 0 ? (prompt_tokens - cached_tokens) / prefill_time.count() : 0.0;
}

// The first token belongs to the prefill.
double GenerateStats::decode_tps() const {
  return decode_time.count() > 0 && completion_tokens > 1 ? (completion_tokens - 1) / decode_time.count() : 0.0;
}

GenerateResult generate(const LoadedModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
                        const GenerateOptions& options) {
  check_arguments(*model.model, prompt, cache, options);
  check_positions(*model.model, cache.tokens.size() + prompt.size(), options.max_tokens, options.kv_cache);
  check_sampling_params(options.sampling);
  GenerateResult result;
  Answer answer(model, options, result);
  const int total = static_cast<int>(prompt.size());
  result.stats.cached_tokens = static_cast<int>(cache.tokens.size());
  result.stats.prompt_tokens = result.stats.cached_tokens + total;
  const auto started = Clock::now();
  const bool verifies = !cache.tokens.empty() && internal::is_chosen_for_check(cache, options.verify_reuse);
  const auto prefilled = [&] {
    if (!prefill_all(*model.model, prompt.first(prompt.size() - 1), cache, options, total)) return false;
    if (verifies && !verify_reuse(*model.model, prompt.back(), cache, options, result.stats)) return false;
    if (options.on_prefilled) options.on_prefilled();
    return !options.cancel.stop_requested();
  };
  try {
    if (!prefilled()) {
      result.finish_reason = FinishReason::cancelled;
    } else if (options.max_tokens == 0) {
      CacheQuantizer quantize(options.kv_cache);
      with_mlx_errors([&] {
        forward(*model.model, as_row(prompt.last(1)), cache.cache, quantize);
        cache.cache.eval();
      });
      record(cache, prompt.last(1));
      if (options.on_progress) options.on_progress(total, total);
      result.stats.prefill_time = Clock::now() - started;
    } else {
      decode(*model.model, prompt.back(), cache, options, total, started, answer, result);
    }
  } catch (...) {
    restore_invariant(*model.model, cache, options.kv_cache);
    throw;
  }
  return result;
}

void prefill(const LanguageModel& model, std::span<const TokenId> prompt, RecordedCache& cache,
             const GenerateOptions& options) {
  check_arguments(model, prompt, cache, options);
  check_positions(model, cache.tokens.size() + prompt.size(), 0, options.kv_cache);
  try {
    prefill_all(model, prompt.first(prompt.size() - 1), cache, options, static_cast<int>(prompt.size()));
  } catch (...) {
    restore_invariant(model, cache, options.kv_cache);
    throw;
  }
}

}  // namespace reprise
