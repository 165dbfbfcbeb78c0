// How a prefill is cut. Private to `engine`. Free functions.
#pragma once

#include "reprise/engine/sequence.h"

namespace reprise::internal {

// Fewer tokens than this are not worth waiting, or a piece of their own.
constexpr int kWorthWaiting = 32;

struct Piece {
  int end = 0;              // position at which it ends
  bool checkpoint = false;  // the state there is kept
};

// The next piece of a sequence that is not yet prefilled: to the next multiple of prefill_step_size, or straight to
// where the next checkpoint or the end is, if that takes no more than one step.
Piece next_piece(const Sequence& sequence, const SchedulerOptions& options, bool needs_checkpoints);

// Tokens at the beginning of both that a prefill of `leader` stores and `follower` can reuse.
int shared_tokens(const Sequence& follower, const Sequence& leader);

// Lets `leader`, which has fewer than `position` tokens, stop with a checkpoint there, or a little before where it
// stops anyway. Returns: where.
int add_cut(Sequence& leader, int position, const SchedulerOptions& options);

}  // namespace reprise::internal
