#include "reprise/engine/generation.h"

#include <utility>

namespace reprise {

void Generation::Shared::push(GenerationEvent event) {
  {
    const std::lock_guard lock(mutex);
    is_complete = event.kind == GenerationEvent::Kind::end;
    events.push_back(std::move(event));
  }
  changed.notify_all();
}

void Generation::Shared::fail(std::exception_ptr why) {
  {
    const std::lock_guard lock(mutex);
    error = std::move(why);
    is_complete = true;
  }
  changed.notify_all();
}

Generation::Generation(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
Generation::Generation(Generation&&) noexcept = default;

Generation& Generation::operator=(Generation&& other) noexcept {
  if (this == &other) return *this;
  if (shared_) cancel();
  shared_ = std::move(other.shared_);
  return *this;
}

Generation::~Generation() {
  if (shared_) cancel();
}

namespace {

// Requires: `lock` holds it.
std::optional<GenerationEvent> take_event(auto& shared) {
  if (!shared.events.empty()) {
    GenerationEvent event = std::move(shared.events.front());
    shared.events.pop_front();
    GenerationResult& result = shared.result;
    result.text += event.text;
    if (event.kind == GenerationEvent::Kind::token) {
      result.tokens.push_back(event.token);
      result.logprobs.push_back(event.logprob);
    } else if (event.kind == GenerationEvent::Kind::end) {
      result.reason = event.reason;
      result.stats = event.stats;
      shared.is_taken = true;
    }
    return event;
  }
  if (!shared.error || std::exchange(shared.is_taken, true)) return {};
  std::rethrow_exception(shared.error);
}

auto has_news(auto& shared) {
  return [&shared] { return !shared.events.empty() || shared.is_complete; };
}

}  // namespace

std::optional<GenerationEvent> Generation::next() {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, has_news(*shared_));
  return take_event(*shared_);
}

std::optional<GenerationEvent> Generation::next_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  if (!shared_->changed.wait_for(lock, timeout, has_news(*shared_))) return {};
  return take_event(*shared_);
}

GenerationResult Generation::wait() {
  while (next()) {
  }
  const std::lock_guard lock(shared_->mutex);
  if (shared_->error) std::rethrow_exception(shared_->error);
  return shared_->result;
}

void Generation::cancel() {
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->is_complete) return;
  }
  const auto inbox = shared_->inbox.lock();
  if (!inbox) return;
  inbox->post([shared = shared_](Scheduler& scheduler) { scheduler.cancel(shared->sequence); });
}

bool Generation::ended() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->is_taken;
}

namespace internal {

bool Stream::take_token(TokenId token, float logprob) noexcept {
  try {
    AnswerText::Piece piece = text_.add(token);
    shared_->push(
        {.kind = GenerationEvent::Kind::token, .token = token, .logprob = logprob, .text = std::move(piece.text)});
    return piece.ended;
  } catch (...) {
    error_ = std::current_exception();
    return true;
  }
}

void Stream::take_progress(int done, int total) noexcept {
  try {
    shared_->push({.kind = GenerationEvent::Kind::progress, .done = done, .total = total});
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Stream::take_end(const SequenceEnd& end) noexcept {
  try {
    if (!error_) error_ = end.error;
    if (error_) return shared_->fail(error_);
    shared_->push(
        {.kind = GenerationEvent::Kind::end, .text = text_.finish(), .reason = end.reason, .stats = end.stats});
  } catch (...) {
    shared_->fail(std::current_exception());
  }
}

}  // namespace internal
}  // namespace reprise
