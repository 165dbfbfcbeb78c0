// Which sequence computes what next: admission within one memory budget, prefill in pieces between decode steps, one
// batch of all that decode, priorities that age, one computation for prompts that arrive together.
//   - Each step decodes every sequence that is ready, then prefills one piece of one sequence: of the highest priority
//     first, among equals in turn, so that a short prompt is not kept waiting by a long one.
//   - A sequence is admitted when its prompt and `reserve_tokens` of its answer fit the budget after what is cached has
//     given way; otherwise it waits, and everyone of no higher priority behind it. One that could never fit is refused
//     at once. So small requests never pass a big one that waits, and as waiting raises the priority, nobody waits for
//     ever. A running answer reserves further as it grows; when that fails the running sequence of the lowest
//     priority, the youngest of those, is set aside: its work is kept in the cache as far as it fits, and it is
//     admitted again later and goes on where it was.
//   - A prompt that shares more with one that is being prefilled than with what is stored waits until that much is
//     stored: it is computed once.
// Free of MLX. Threads: all calls from one thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/base/clock.h"
#include "reprise/base/tokens.h"
#include "reprise/engine/batch_runner.h"
#include "reprise/generate/finish_reason.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

struct SchedulerOptions {
  int max_batch = 32;           // sequences that are prefilled or decoded at a time, ≥ 1
  int max_waiting = 1024;       // submit refuses beyond it
  int prefill_step_size = 256;  // tokens of a piece
  int checkpoint_every = 512;   // tokens between checkpoints of a prefill, ≥ 1
  int reserve_tokens = 256;     // of an answer, ahead of its growth
  // A waiting sequence counts as one priority higher for each such span; 0: never.
  std::chrono::milliseconds aging = std::chrono::seconds(10);
};

struct SequenceStats {
  int prompt_tokens = 0;
  int cached_tokens = 0;      // of the prompt, at its first admission
  int completion_tokens = 0;  // the stop token included
  int times_set_aside = 0;
  Clock::Duration queued{0};               // until its first admission
  Clock::Duration time_to_first_token{0};  // since submit; 0 when there was none
  Clock::Duration decode_time{0};          // from the first token to the last
};

struct SequenceEnd {
  FinishReason reason = FinishReason::length;
  std::exception_ptr error;  // set: it failed, `reason` says nothing
  SequenceStats stats;
};

struct SequenceRequest {
  Tokens prompt;
  int max_tokens = 256;  // 0: only the prompt is computed (all but its last token) and stored
  SamplingParams sampling = {};
  int priority = 0;  // higher goes first
  std::string salt = {};
  bool keep = true;
  std::vector<int> checkpoints = {};  // positions in the prompt at which the state is to be kept (ends of messages)
  // Each token as it comes. Returns: whether the answer ends with it.
  std::function<bool(TokenId token, float logprob)> on_token = {};
  // Tokens of the prompt computed or reused so far, of all; after admission and each piece, and all with the first
  // token.
  std::function<void(int done, int total)> on_progress = {};
  // Exactly once, last. None of these may throw or call the scheduler.
  std::function<void(const SequenceEnd&)> on_end = {};
};

struct SchedulerStats {
  int waiting = 0, prefilling = 0, decoding = 0;
  std::uint64_t submitted = 0, finished = 0, failed = 0, cancelled = 0, refused = 0, set_aside = 0;
  std::uint64_t prompt_tokens = 0, cached_tokens = 0, prefilled_tokens = 0, completion_tokens = 0;
  std::uint64_t decode_steps = 0, prefill_steps = 0;
  std::size_t max_nbytes_seen = 0;  // of the runner, after each step
  std::uint64_t over_budget = 0;    // steps after which it was more than its budget: a defect
};

// Whether prompt and answer fit the budget when they are alone and nothing is cached. Returns: why not, with both sizes
// and what to do; empty: they do. Threads: any.
std::string budget_objection(const BatchRunner& runner, std::size_t prompt_tokens, int max_tokens);

class Scheduler {
 public:
  // Throws: invalid_argument for options out of their range. `runner` and `clock` must outlive it.
  Scheduler(BatchRunner& runner, const SchedulerOptions& options = {}, const Clock& clock = steady_clock());
  ~Scheduler();  // ends what is there as cancelled

  // Throws: invalid_argument (empty prompt, max_tokens < 0); resource_exhausted when too many wait, or prompt and
  // answer can never fit the budget (the message says both sizes). Nothing is called then.
  SequenceId submit(SequenceRequest request);

  // Ends the sequence now, in whatever state; what it computed is kept. Nothing for an id that is gone.
  void cancel(SequenceId id);

  // Ends all there is with this error.
  void fail(const std::exception_ptr& error);

  // Does one step's work. Returns: whether there is more to do now. Never throws for what a sequence or the runner
  // does.
  bool step();

  bool idle() const;  // nothing waits or runs
  const SchedulerStats& stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
