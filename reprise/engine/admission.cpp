// Who comes to run. The queue is strict: the first that does not fit keeps everyone behind it waiting, so that small
// requests cannot pass a big one for ever; and waiting raises the priority, so that nobody stays behind for ever.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/engine/scheduler_impl.h"

namespace reprise {

using internal::aged;
using internal::in_mib;
using internal::kWorthWaiting;

void Scheduler::Impl::admit() {
  if (waiting_.empty() || static_cast<int>(running_.size()) >= options_.max_batch) return;
  const auto now = clock_.now();
  using Rank = std::tuple<std::int64_t, bool, SequenceId>;
  std::vector<std::pair<Rank, Sequence*>> queue;
  for (Sequence* s : waiting_) {
    queue.emplace_back(Rank(-aged(s->priority, s->waiting_since, now, options_.aging), !s->was_set_aside, s->id), s);
  }
  std::sort(queue.begin(), queue.end());
  for (const auto& [rank, sequence] : queue) {
    if (follows(*sequence)) continue;
    if (try_admit(*sequence, now) == Admission::waits) return;
    if (static_cast<int>(running_.size()) >= options_.max_batch) return;
  }
}

int Scheduler::Impl::reusable(const Sequence& sequence) const {
  try {
    return runner_.reusable(sequence.request.salt, sequence.tokens);
  } catch (const std::exception&) {
    return 0;  // start will say what is wrong
  }
}

bool Scheduler::Impl::follows(Sequence& sequence) {
  if (sequence.leader != 0) {
    const Sequence* leader = find(sequence.leader);
    if (leader && leader->state == State::prefilling && leader->computed < sequence.leader_tokens) return true;
    sequence.leader = 0;
  }
  Sequence* leader = nullptr;
  int shared = 0;
  for (Sequence* candidate : running_) {
    if (candidate->state != State::prefilling || !candidate->keeps()) continue;
    if (candidate->request.salt != sequence.request.salt) continue;
    const int length = internal::shared_tokens(sequence, *candidate);
    if (length <= std::max(shared, candidate->computed)) continue;
    leader = candidate;
    shared = length;
  }
  if (!leader) return false;
  if (shared - reusable(sequence) < kWorthWaiting) return false;
  sequence.leader = leader->id;
  sequence.leader_tokens = needs_checkpoints_ ? internal::add_cut(*leader, shared, options_) : shared;
  return true;
}

void Scheduler::Impl::add_cuts(Sequence& leader, const Sequence& follower) const {
  if (!needs_checkpoints_ || leader.state != State::prefilling || !leader.keeps()) return;
  if (leader.request.salt != follower.request.salt) return;
  const int shared = internal::shared_tokens(follower, leader);
  if (shared > leader.computed && shared >= kWorthWaiting) internal::add_cut(leader, shared, options_);
}

Scheduler::Impl::Admission Scheduler::Impl::try_admit(Sequence& sequence, Clock::TimePoint now) {
  const bool alone = running_.empty();
  if (!alone && sequence.refused_at == departures_) return Admission::waits;
  const int wanted = sequence.needs_whole
                         ? sequence.limit()
                         : static_cast<int>(std::min<std::int64_t>(
                               sequence.limit(), std::int64_t{sequence.size()} + options_.reserve_tokens));
  const std::size_t promised = budget_.promised(running_);

  if (!sequence.needs_whole) {
    const int expected = reusable(sequence);
    const std::size_t need = budget_.of_start(wanted, expected);
    if (!budget_.make_room(promised + need)) return no_room(sequence, need);
    if (!start(sequence)) return Admission::ended;
    // What it was to reuse may have had to go for the rest of it.
    const std::size_t real_need = budget_.of_start(wanted, sequence.computed);
    if (real_need <= need || budget_.make_room(promised + real_need)) {
      started(sequence, wanted, now);
      return Admission::running;
    }
    runner_.finish(sequence.run);
    if (!alone) return no_room(sequence, real_need);
  }
  // Room for all of it: whatever is still cached then fits beside it.
  const std::size_t need = budget_.of_start(wanted, 0);
  if (!budget_.make_room(promised + need)) return no_room(sequence, need);
  if (!start(sequence)) return Admission::ended;
  started(sequence, wanted, now);
  return Admission::running;
}

Scheduler::Impl::Admission Scheduler::Impl::no_room(Sequence& sequence, std::size_t need) {
  if (!running_.empty()) {
    sequence.refused_at = departures_;
    return Admission::waits;
  }
  end(sequence, FinishReason::length,
      std::make_exception_ptr(
          Error(ErrorCode::resource_exhausted, "[Scheduler] nothing else runs, and still there is no room for " +
                                                   in_mib(need) + ": of the budget of " + in_mib(runner_.max_bytes()) +
                                                   ", " + in_mib(runner_.nbytes()) +
                                                   " are taken by what is pinned in the prefix cache; unpin some, or "
                                                   "raise the budget (--prompt-cache-bytes)")));
  return Admission::ended;
}

bool Scheduler::Impl::start(Sequence& sequence) {
  sequence.run = next_id_++;
  try {
    sequence.computed = runner_.start({.id = sequence.run,
                                       .tokens = sequence.tokens,
                                       .sampling = &sequence.request.sampling,
                                       .num_draws = static_cast<std::uint64_t>(sequence.stats.completion_tokens),
                                       .salt = sequence.request.salt,
                                       .keep = sequence.keeps()});
    return true;
  } catch (...) {
    runner_.finish(sequence.run);
    end(sequence, FinishReason::length, std::current_exception());
    return false;
  }
}

void Scheduler::Impl::started(Sequence& sequence, int reserved, Clock::TimePoint now) {
  std::erase(waiting_, &sequence);
  running_.push_back(&sequence);
  sequence.state = State::prefilling;
  sequence.priority = aged(sequence.priority, sequence.waiting_since, now, options_.aging);
  sequence.reserved = reserved;
  sequence.shares = sequence.computed > 0;
  sequence.is_ahead = false;
  sequence.cuts.clear();
  sequence.turn = turns_;
  sequence.had_piece = false;
  sequence.last_piece = now;
  // Whoever of those that share a page appends to it second copies it.
  if (sequence.shares) {
    for (Sequence* other : running_) {
      if (other->request.salt == sequence.request.salt) other->may_copy = true;
    }
  }
  if (sequence.stats.times_set_aside == 0) {
    sequence.stats.queued = now - sequence.submitted;
    sequence.stats.cached_tokens = sequence.computed;
    stats_.prompt_tokens += static_cast<std::uint64_t>(sequence.prompt_tokens);
    stats_.cached_tokens += static_cast<std::uint64_t>(sequence.computed);
  }
  for (const Sequence* follower : waiting_) add_cuts(sequence, *follower);
  if (sequence.stats.completion_tokens == 0) report_progress(sequence, sequence.computed);
  if (sequence.computed >= sequence.prefill_end()) prefilled(sequence);
}

}  // namespace reprise
