// One request on its way through the scheduler. Private to `engine`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "reprise/engine/scheduler.h"

namespace reprise::internal {

struct Sequence {
  enum class State { waiting, prefilling, decoding };

  SequenceId id = 0;
  SequenceRequest request;  // its prompt has moved to `tokens`
  int prompt_tokens = 0;
  Tokens tokens;  // the prompt, and what earlier runs answered; unchanged during a run, the runner looks at it
  Tokens answer;  // of this run
  State state = State::waiting;
  std::int64_t priority = 0;  // with what it gained by waiting, up to its last admission

  // While it waits.
  Clock::TimePoint waiting_since;
  bool was_set_aside = false;
  // As the only one running it lacked room: it runs again when there is room for its whole answer, and stores nothing,
  // so that nothing but itself can take that room.
  bool needs_whole = false;
  std::optional<std::uint64_t> refused_at;  // departures when it last did not fit: until the next one it is not tried
  SequenceId leader = 0;                    // of whose prefill it waits for …
  int leader_tokens = 0;                    // … so many tokens to be stored; 0: of nobody's

  // While it runs.
  SequenceId run = 0;   // the runner's name for this run
  int computed = 0;     // tokens that the runner has, reused ones included
  int reserved = 0;     // tokens that the plan has room for
  bool shares = false;  // it began with stored tokens: one page may come to be copied, by it or by whom it shares with
  bool may_copy = false;   // with its next row
  bool is_ahead = false;   // the runner may have begun its next decode step
  std::vector<int> cuts;   // positions at which somebody waits for a checkpoint; sorted
  std::uint64_t turn = 0;  // of its last piece, or the one before it came
  bool had_piece = false;  // in this run
  Clock::TimePoint last_piece;

  Clock::TimePoint submitted;
  Clock::TimePoint first_token;
  SequenceStats stats;

  // The most tokens that it can come to hold.
  int limit() const { return prompt_tokens + request.max_tokens; }
  bool keeps() const { return request.keep && !needs_whole; }
  int size() const { return static_cast<int>(tokens.size()); }
  // Tokens that the runner has after the next decode step and the one that it may begin ahead.
  int after_decode() const { return std::min(computed + 2, std::max(limit(), computed + 1)); }
  // What a prefill computes: the last token is the first decode's.
  int prefill_end() const { return size() - 1; }
};

// With a point for each `aging` since `since`.
inline std::int64_t aged(std::int64_t priority, Clock::TimePoint since, Clock::TimePoint now, Clock::Duration aging) {
  return aging.count() > 0 && now > since ? priority + (now - since) / aging : priority;
}

}  // namespace reprise::internal
