#include "reprise/engine/scheduler.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/engine/scheduler_impl.h"

namespace reprise {

using internal::aged;
using internal::in_mib;

namespace {

void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw Error(ErrorCode::invalid_argument, std::string("[Scheduler] ") + name + " must be at least " +
                                               std::to_string(least) + ", but got " + std::to_string(value));
}

const SchedulerOptions& checked(const SchedulerOptions& options) {
  check_at_least("max_batch", options.max_batch, 1);
  check_at_least("max_waiting", options.max_waiting, 1);
  check_at_least("prefill_step_size", options.prefill_step_size, 1);
  check_at_least("checkpoint_every", options.checkpoint_every, 1);
  check_at_least("reserve_tokens", options.reserve_tokens, 1);
  check_at_least("aging", options.aging.count(), 0);
  return options;
}

}  // namespace

Scheduler::Impl::Impl(BatchRunner& runner, const SchedulerOptions& options, const Clock& clock)
    : runner_(runner),
      options_(checked(options)),
      clock_(clock),
      budget_(runner),
      needs_checkpoints_(runner.needs_checkpoints()) {}

SequenceId Scheduler::Impl::submit(SequenceRequest request) {
  const auto refuse = [&](ErrorCode code, const std::string& why) {
    ++stats_.refused;
    throw Error(code, "[Scheduler::submit] " + why);
  };
  if (request.prompt.empty()) refuse(ErrorCode::invalid_argument, "the prompt is empty: give at least one token");
  if (request.max_tokens < 0) {
    refuse(ErrorCode::invalid_argument,
           "max_tokens must not be negative, but got " + std::to_string(request.max_tokens));
  }
  const std::string objection = budget_objection(runner_, request.prompt.size(), request.max_tokens);
  if (!objection.empty()) refuse(ErrorCode::resource_exhausted, objection);
  if (static_cast<int>(waiting_.size()) >= options_.max_waiting) {
    refuse(ErrorCode::resource_exhausted,
           std::to_string(waiting_.size()) + " requests wait already, and no more are taken: try again later");
  }

  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.id = next_id_++;
  sequence.tokens = std::move(request.prompt);
  sequence.request = std::move(request);
  std::sort(sequence.request.checkpoints.begin(), sequence.request.checkpoints.end());
  sequence.prompt_tokens = sequence.stats.prompt_tokens = sequence.size();
  sequence.priority = sequence.request.priority;
  sequence.submitted = sequence.waiting_since = clock_.now();
  all_.emplace(sequence.id, std::move(owned));
  waiting_.push_back(&sequence);
  for (Sequence* leader : running_) add_cuts(*leader, sequence);
  ++stats_.submitted;
  return sequence.id;
}

void Scheduler::Impl::cancel(SequenceId id) {
  if (Sequence* sequence = find(id)) end(*sequence, FinishReason::cancelled);
}

void Scheduler::Impl::end_all(FinishReason reason, const std::exception_ptr& error) {
  while (!all_.empty()) end(*all_.begin()->second, reason, error);
}

void Scheduler::Impl::step() {
  admit();
  secure_rows();
  const auto turn = choose_turn();
  decode(turn);
  if (turn) prefill(*turn);
  try {
    runner_.tick();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("[Scheduler] housekeeping failed: ") + error.what());
  }
  const std::size_t nbytes = runner_.nbytes();
  stats_.max_nbytes_seen = std::max(stats_.max_nbytes_seen, nbytes);
  if (nbytes > runner_.max_bytes()) ++stats_.over_budget;
}

std::int64_t Scheduler::Impl::priority_of_prefill(const Sequence& sequence, Clock::TimePoint now) const {
  std::int64_t priority = aged(sequence.priority, sequence.last_piece, now, options_.aging);
  // Who waits for this prefill lends it its own.
  for (const Sequence* follower : waiting_) {
    if (follower->leader != sequence.id) continue;
    priority = std::max(priority, aged(follower->priority, follower->waiting_since, now, options_.aging));
  }
  return priority;
}

std::optional<Scheduler::Impl::Turn> Scheduler::Impl::choose_turn() const {
  const auto now = clock_.now();
  using Rank = std::tuple<std::int64_t, std::uint64_t, bool, SequenceId>;
  std::optional<Rank> best;
  const Sequence* first = nullptr;
  for (const Sequence* sequence : running_) {
    if (sequence->state != State::prefilling) continue;
    // One that has just come goes before the one that had the last turn, and behind all others.
    const Rank rank(-priority_of_prefill(*sequence, now), sequence->turn, sequence->had_piece, sequence->id);
    if (best && *best < rank) continue;
    best = rank;
    first = sequence;
  }
  if (!first) return {};
  return Turn{first->id, internal::next_piece(*first, options_, needs_checkpoints_)};
}

void Scheduler::Impl::secure_rows() {
  for (;;) {
    const auto decoding = rows();
    const auto short_of_room = std::find_if(decoding.begin(), decoding.end(), [](const Sequence* sequence) {
      return sequence->reserved < sequence->after_decode();
    });
    if (short_of_room == decoding.end()) break;
    reserve_more(**short_of_room);
  }
  for (auto decoding = rows(); !decoding.empty(); decoding = rows()) {
    const bool same_rows = std::equal(decoding.begin(), decoding.end(), last_rows_.begin(), last_rows_.end(),
                                      [](const Sequence* sequence, SequenceId run) { return sequence->run == run; });
    if (budget_.make_room(budget_.of_decode(decoding, same_rows))) return;
    relieve();
  }
}

void Scheduler::Impl::reserve_more(Sequence& sequence) {
  const int needed = sequence.after_decode();
  sequence.reserved = static_cast<int>(std::max<std::int64_t>(
      needed, std::min<std::int64_t>(sequence.limit(), std::int64_t{sequence.reserved} + options_.reserve_tokens)));
  const SequenceId id = sequence.id;
  while (!budget_.make_room(budget_.promised(running_))) {
    if (running_.size() == 1) {
      sequence.reserved = needed;  // one step at a time
      return;
    }
    relieve();
    if (find(id)->state != State::decoding) return;
  }
}

void Scheduler::Impl::relieve() {
  Sequence& lowest = **std::min_element(running_.begin(), running_.end(), [](const Sequence* a, const Sequence* b) {
    return std::pair(a->priority, b->id) < std::pair(b->priority, a->id);
  });
  if (running_.size() == 1 && std::exchange(lowest.needs_whole, true)) {
    end(lowest, FinishReason::length,
        std::make_exception_ptr(
            Error(ErrorCode::resource_exhausted,
                  "[Scheduler] nothing else runs, and still there is no room for another token: of the budget of " +
                      in_mib(runner_.max_bytes()) + ", " + in_mib(runner_.nbytes()) +
                      " are taken, also by what is pinned in the prefix cache; unpin some, or raise the budget "
                      "(--prompt-cache-bytes)")));
    return;
  }
  set_aside(lowest);
}

bool Scheduler::Impl::may_look_ahead(const std::vector<Sequence*>& rows, const std::optional<Turn>& turn) const {
  for (const Sequence* row : rows) {
    if (row->stats.completion_tokens + 1 >= row->request.max_tokens) return false;
  }
  if (!turn) return true;
  if (turn->piece.end >= find(turn->id)->prefill_end()) return false;
  return std::none_of(waiting_.begin(), waiting_.end(), [&](const Sequence* follower) {
    return follower->leader == turn->id && follower->leader_tokens <= turn->piece.end;
  });
}

void Scheduler::Impl::decode(const std::optional<Turn>& turn) {
  const auto decoding = rows();
  if (decoding.empty()) return;
  const bool look_ahead = may_look_ahead(decoding, turn);
  const auto results = decode_rows(decoding, look_ahead);
  ++stats_.decode_steps;
  last_rows_.clear();
  for (Sequence* sequence : decoding) {
    sequence->is_ahead = look_ahead;
    last_rows_.push_back(sequence->run);
  }
  for (std::size_t i = 0; i < decoding.size(); ++i) take_token(*decoding[i], results[i]);
}

std::vector<DecodedToken> Scheduler::Impl::decode_rows(const std::vector<Sequence*>& rows, bool look_ahead) {
  std::vector<SequenceId> ids;
  for (const Sequence* row : rows) ids.push_back(row->run);
  std::exception_ptr error;
  try {
    auto results = runner_.decode(ids, look_ahead);
    if (results.size() == ids.size()) return results;
    error = std::make_exception_ptr(Error(ErrorCode::internal, "[Scheduler] a decode of " + std::to_string(ids.size()) +
                                                                   " rows gave " + std::to_string(results.size()) +
                                                                   " tokens"));
  } catch (...) {
    error = std::current_exception();
  }
  if (rows.size() == 1) return {DecodedToken{.id = ids.front(), .error = error}};
  std::vector<DecodedToken> results;
  for (Sequence* row : rows) results.push_back(decode_rows({row}, false).front());
  return results;
}

void Scheduler::Impl::take_token(Sequence& sequence, const DecodedToken& decoded) {
  if (decoded.error) return end(sequence, FinishReason::length, decoded.error);
  const auto now = clock_.now();
  SequenceStats& stats = sequence.stats;
  ++sequence.computed;
  sequence.may_copy = false;
  sequence.answer.push_back(decoded.token);
  ++stats.completion_tokens;
  ++stats_.completion_tokens;
  if (stats.completion_tokens == 1) {
    report_progress(sequence, sequence.prompt_tokens);
    sequence.first_token = now;
    stats.time_to_first_token = now - sequence.submitted;
  }
  stats.decode_time = now - sequence.first_token;
  const bool stopped = sequence.request.on_token && sequence.request.on_token(decoded.token, decoded.logprob);
  if (stopped) return end(sequence, FinishReason::stop);
  if (stats.completion_tokens >= sequence.request.max_tokens) end(sequence, FinishReason::length);
}

void Scheduler::Impl::prefill(const Turn& turn) {
  for (;;) {
    const Sequence* sequence = find(turn.id);
    if (!sequence || sequence->state != State::prefilling) return;
    if (budget_.make_room(budget_.of_piece(*sequence, turn.piece.end))) break;
    relieve();
  }
  Sequence& sequence = *find(turn.id);
  const int count = turn.piece.end - sequence.computed;
  // A checkpoint may take what is cached, but not what has been promised to sequences.
  const bool checkpoint = turn.piece.checkpoint && (!needs_checkpoints_ || budget_.has_room_to_spare(running_));
  try {
    runner_.prefill(sequence.run, count, checkpoint);
  } catch (...) {
    return end(sequence, FinishReason::length, std::current_exception());
  }
  ++stats_.prefill_steps;
  stats_.prefilled_tokens += static_cast<std::uint64_t>(count);
  sequence.computed = turn.piece.end;
  sequence.may_copy = false;
  sequence.turn = ++turns_;
  sequence.had_piece = true;
  sequence.last_piece = clock_.now();
  if (sequence.stats.completion_tokens == 0) report_progress(sequence, sequence.computed);
  if (sequence.computed >= sequence.prefill_end()) prefilled(sequence);
}

void Scheduler::Impl::prefilled(Sequence& sequence) {
  sequence.state = State::decoding;
  if (sequence.request.max_tokens == 0) end(sequence, FinishReason::length);
}

void Scheduler::Impl::report_progress(const Sequence& sequence, int done) const {
  if (sequence.request.on_progress) sequence.request.on_progress(done, sequence.prompt_tokens);
}

void Scheduler::Impl::set_aside(Sequence& sequence) {
  leave(sequence);
  sequence.state = State::waiting;
  waiting_.push_back(&sequence);
  sequence.tokens.insert(sequence.tokens.end(), sequence.answer.begin(), sequence.answer.end());
  sequence.answer.clear();
  sequence.was_set_aside = true;
  sequence.waiting_since = clock_.now();
  sequence.refused_at = departures_;
  ++sequence.stats.times_set_aside;
  ++stats_.set_aside;
}

void Scheduler::Impl::leave(Sequence& sequence) {
  runner_.finish(sequence.run);
  std::erase(running_, &sequence);
  ++departures_;
}

void Scheduler::Impl::end(Sequence& sequence, FinishReason reason, std::exception_ptr error) {
  if (sequence.state == State::waiting) {
    std::erase(waiting_, &sequence);
    if (sequence.stats.times_set_aside == 0) sequence.stats.queued = clock_.now() - sequence.submitted;
  } else {
    leave(sequence);
  }
  ++(error ? stats_.failed : reason == FinishReason::cancelled ? stats_.cancelled : stats_.finished);
  const auto owned = std::move(all_.extract(sequence.id).mapped());
  if (owned->request.on_end) owned->request.on_end({.reason = reason, .error = error, .stats = owned->stats});
}

std::vector<Scheduler::Impl::Sequence*> Scheduler::Impl::rows() const {
  std::vector<Sequence*> decoding;
  std::copy_if(running_.begin(), running_.end(), std::back_inserter(decoding),
               [](const Sequence* sequence) { return sequence->state == State::decoding; });
  return decoding;
}

Scheduler::Impl::Sequence* Scheduler::Impl::find(SequenceId id) const {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : found->second.get();
}

const SchedulerStats& Scheduler::Impl::counted() {
  stats_.waiting = static_cast<int>(waiting_.size());
  stats_.decoding = static_cast<int>(rows().size());
  stats_.prefilling = static_cast<int>(running_.size()) - stats_.decoding;
  return stats_;
}

Scheduler::Scheduler(BatchRunner& runner, const SchedulerOptions& options, const Clock& clock)
    : impl_(std::make_unique<Impl>(runner, options, clock)) {}

Scheduler::~Scheduler() { impl_->end_all(FinishReason::cancelled, nullptr); }

SequenceId Scheduler::submit(SequenceRequest request) { return impl_->submit(std::move(request)); }
void Scheduler::cancel(SequenceId id) { impl_->cancel(id); }

void Scheduler::fail(const std::exception_ptr& error) { impl_->end_all(FinishReason::length, error); }

bool Scheduler::step() {
  impl_->step();
  return !idle();
}

bool Scheduler::idle() const { return impl_->idle(); }
const SchedulerStats& Scheduler::stats() const { return impl_->counted(); }

}  // namespace reprise
