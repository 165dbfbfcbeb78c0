// Many conversations over one model: requests from any thread, answered together in one batch by the one thread that
// evaluates, each from the longest prefix that anybody has computed before.
// Threads: Engine and Generation may be used from any thread. Owns: the engine thread, the prefix cache. The model must
// outlive it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/engine/scheduler.h"
#include "reprise/generate/finish_reason.h"
#include "reprise/generate/loaded_model.h"
#include "reprise/nn/keys_values.h"
#include "reprise/prefix/tiers/prefix_cache.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

struct EngineOptions {
  SchedulerOptions scheduler = {};
  // One budget for keys, values and recurrent state, live and cached (--prompt-cache-bytes).
  std::size_t max_bytes = std::size_t{2} << 30;
  std::optional<std::chrono::milliseconds> ttl = {};
  // Of what is cached on disk, none: memory only (--cache-dir). It needs a model with a full_fingerprint.
  std::optional<std::filesystem::path> cache_dir = {};
  std::size_t max_disk_bytes = std::size_t{8} << 30;
  std::optional<KVQuantization> kv_quantization = {};  // of every row from the first on
  // Part of the requests over a stored prefix, 0 … 1, whose next-token logits are compared with a cold run; see
  // GenerateOptions.
  double verify_reuse = 0.0;
};

struct Request {
  Tokens prompt;
  int max_tokens = 256;
  SamplingParams sampling = {};
  std::vector<TokenId> stop_tokens = {};  // in addition to the tokenizer's end-of-answer ids
  bool ignore_eos = false;
  std::vector<std::string> stop = {};  // matched on the text; held back until certain; not part of the text
  int priority = 0;                    // higher goes first
  std::string salt = {};               // requests of different salts never share a prefix
  bool keep = true;                    // what is computed stays in the prefix cache
  std::vector<int> checkpoints = {};   // see SequenceRequest
};

struct GenerationEvent {
  enum class Kind { progress, token, end };
  Kind kind = Kind::token;
  int done = 0, total = 0;  // progress: of the prompt
  TokenId token = 0;
  float logprob = 0.0f;
  std::string text = {};                       // that became certain with this token, or at the end; may be empty
  FinishReason reason = FinishReason::length;  // end
  SequenceStats stats = {};                    // end
};

struct GenerationResult {
  Tokens tokens;
  std::vector<float> logprobs;
  std::string text;
  FinishReason reason = FinishReason::length;
  SequenceStats stats;
};

// One answer as it comes: events wait here until they are taken, however slow the reader. Letting go of it cancels.
// Void when moved from.
class Generation {
 public:
  struct Shared;
  Generation(Generation&&) noexcept;
  Generation& operator=(Generation&&) noexcept;
  ~Generation();

  // Waits for the next event. None after the end. Throws: what the sequence failed with.
  std::optional<GenerationEvent> next();
  // None also when nothing came in time.
  std::optional<GenerationEvent> next_for(std::chrono::milliseconds timeout);
  // Waits for the end. Returns: all of it, also what has been taken as events. Throws: as next.
  GenerationResult wait();
  // The end comes as an event, with reason cancelled, within a step. Nothing after the end.
  void cancel();
  bool ended() const;  // the end, or the failure, has been taken

 private:
  friend class Engine;
  explicit Generation(std::shared_ptr<Shared> shared);
  std::shared_ptr<Shared> shared_;
};

struct EngineStats {
  SchedulerStats scheduler;
  PrefixCacheStats prefix;
  std::size_t nbytes = 0;  // live and cached
  std::size_t max_bytes = 0;
  std::uint64_t reuse_checks = 0, reuse_mismatches = 0;
};

class Engine {
 public:
  // Throws: invalid_argument for options out of range; unsupported for a model whose caches cannot be paged, or on a
  // GPU; failed_precondition for a cache_dir with a model without full_fingerprint; what opening the disk tier throws.
  explicit Engine(const LoadedModel& model, const EngineOptions& options = {});
  // Over another runner, which is made, used and destroyed on the engine thread.
  using MakeRunner = std::function<std::unique_ptr<BatchRunner>()>;
  Engine(const LoadedModel& model, const EngineOptions& options, const MakeRunner& make_runner);
  // Cancels what runs (its end events still come), writes what the disk tier has queued.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws: invalid_argument (as generate: empty prompt, ids outside the vocabulary, sampling parameters, beyond the
  // model's positions); resource_exhausted (see Scheduler::submit; what to do is said); failed_precondition when the
  // destructor has begun.
  Generation submit(Request request);

  // Waits for the step that runs.
  EngineStats stats() const;
  // Runs `work` on the engine thread between two steps, with the prefix cache, and waits for it: to list, pin, warm or
  // clear it. What it throws comes back. `work` must not call the engine.
  void with_prefix_cache(const std::function<void(PrefixCache&)>& work);

  const LoadedModel& model() const;
  const EngineOptions& options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
