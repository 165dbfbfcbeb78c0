// The queue between the engine thread and whoever reads an answer, and the engine's end of it. Private to `engine`.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

#include "reprise/engine/engine.h"
#include "reprise/engine/inbox.h"
#include "reprise/generate/answer_text.h"

namespace reprise {

// Threads: any, internally locked. Unbounded: a reader that is slow keeps nobody waiting.
struct Generation::Shared {
  explicit Shared(std::weak_ptr<internal::Inbox> the_inbox) : inbox(std::move(the_inbox)) {}

  void push(GenerationEvent event);
  void fail(std::exception_ptr why);

  const std::weak_ptr<internal::Inbox> inbox;
  SequenceId sequence = 0;  // of the engine thread alone

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::deque<GenerationEvent> events;
  std::exception_ptr error;  // after the last event
  bool is_complete = false;  // nothing more will come
  bool is_taken = false;     // the end, or the failure
  GenerationResult result;   // of the events that have been taken
};

namespace internal {

// What the scheduler tells of a sequence, as text and events. On the engine thread; throws nothing.
class Stream {
 public:
  Stream(std::shared_ptr<Generation::Shared> shared, AnswerText text)
      : shared_(std::move(shared)), text_(std::move(text)) {}

  bool take_token(TokenId token, float logprob) noexcept;
  void take_progress(int done, int total) noexcept;
  void take_end(const SequenceEnd& end) noexcept;
  Generation::Shared& shared() { return *shared_; }

 private:
  std::shared_ptr<Generation::Shared> shared_;
  AnswerText text_;
  std::exception_ptr error_;
};

}  // namespace internal
}  // namespace reprise
