// The scheduler's state and its parts. Private to `engine`.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "reprise/engine/budget.h"
#include "reprise/engine/pieces.h"
#include "reprise/engine/scheduler.h"
#include "reprise/engine/sequence.h"

namespace reprise {

// Invariant between calls: every sequence of all_ is either in waiting_ or, known to the runner, in running_.
struct Scheduler::Impl {
 public:
  Impl(BatchRunner& runner, const SchedulerOptions& options, const Clock& clock);

  SequenceId submit(SequenceRequest request);
  void cancel(SequenceId id);
  void end_all(FinishReason reason, const std::exception_ptr& error);
  void step();
  bool idle() const { return all_.empty(); }
  const SchedulerStats& counted();

 private:
  using Sequence = internal::Sequence;
  using State = Sequence::State;

  // scheduler.cpp
  // What is to be prefilled in this step.
  struct Turn {
    SequenceId id = 0;
    internal::Piece piece;
  };
  std::optional<Turn> choose_turn() const;
  std::int64_t priority_of_prefill(const Sequence& sequence, Clock::TimePoint now) const;
  // Room for the next decode step; sets sequences aside as it must.
  void secure_rows();
  void reserve_more(Sequence& sequence);
  // One running sequence less, because there is no room: the lowest is set aside, a last one starts again with all the
  // room there is, and fails if it had that.
  void relieve();
  bool may_look_ahead(const std::vector<Sequence*>& rows, const std::optional<Turn>& turn) const;
  void decode(const std::optional<Turn>& turn);
  std::vector<DecodedToken> decode_rows(const std::vector<Sequence*>& rows, bool look_ahead);
  void take_token(Sequence& sequence, const DecodedToken& decoded);
  void prefill(const Turn& turn);
  // The prompt is there: it decodes from the next step on, or has ended.
  void prefilled(Sequence& sequence);
  void report_progress(const Sequence& sequence, int done) const;
  void set_aside(Sequence& sequence);
  // Takes it out of the runner and of running_.
  void leave(Sequence& sequence);
  void end(Sequence& sequence, FinishReason reason, std::exception_ptr error = nullptr);
  std::vector<Sequence*> rows() const;
  Sequence* find(SequenceId id) const;

  // admission.cpp
  void admit();
  int reusable(const Sequence& sequence) const;
  // Whether it had better wait for a prefill that is on its way.
  bool follows(Sequence& sequence);
  enum class Admission { running, waits, ended };
  Admission try_admit(Sequence& sequence, Clock::TimePoint now);
  // Returns: false when it has ended with an error.
  bool start(Sequence& sequence);
  void started(Sequence& sequence, int reserved, Clock::TimePoint now);
  Admission no_room(Sequence& sequence, std::size_t need);
  // Checkpoints for those who wait and share more with `leader` than is computed.
  void add_cuts(Sequence& leader, const Sequence& follower) const;

  BatchRunner& runner_;
  const SchedulerOptions options_;
  const Clock& clock_;
  internal::Budget budget_;
  const bool needs_checkpoints_;
  SequenceId next_id_ = 1;
  std::uint64_t turns_ = 0;
  std::uint64_t departures_ = 0;  // of running sequences: only then what did not fit may fit
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> all_;
  std::vector<Sequence*> waiting_;     // in no order
  std::vector<Sequence*> running_;     // in the order of admission, so that rows keep their places in the batch
  std::vector<SequenceId> last_rows_;  // of the runner, in the last decode
  SchedulerStats stats_;
};

}  // namespace reprise
