#include "reprise/engine/pieces.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

namespace reprise::internal {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

int next_multiple(int position, int step) {
  return static_cast<int>(std::min<std::int64_t>(kNever, (std::int64_t{position} / step + 1) * step));
}

// `sorted`: ascending.
int next_of(const std::vector<int>& sorted, int position) {
  const auto found = std::upper_bound(sorted.begin(), sorted.end(), position);
  return found == sorted.end() ? kNever : *found;
}

int next_checkpoint(const Sequence& sequence, int position, const SchedulerOptions& options) {
  return std::min({next_multiple(position, options.checkpoint_every), next_of(sequence.request.checkpoints, position),
                   next_of(sequence.cuts, position), sequence.prefill_end()});
}

}  // namespace

Piece next_piece(const Sequence& sequence, const SchedulerOptions& options, bool needs_checkpoints) {
  const int begin = sequence.computed;
  const int stop = needs_checkpoints ? next_checkpoint(sequence, begin, options) : sequence.prefill_end();
  if (stop - begin <= options.prefill_step_size) return {stop, true};
  return {next_multiple(begin, options.prefill_step_size), false};
}

int shared_tokens(const Sequence& follower, const Sequence& leader) {
  const auto length = static_cast<std::size_t>(std::min(follower.prefill_end(), leader.prefill_end()));
  const std::span<const TokenId> ours(follower.tokens.data(), length);
  return static_cast<int>(std::mismatch(ours.begin(), ours.end(), leader.tokens.begin()).first - ours.begin());
}

int add_cut(Sequence& leader, int position, const SchedulerOptions& options) {
  const int from = std::max(leader.computed, position - kWorthWaiting);
  if (const int before = next_checkpoint(leader, from, options); before <= position) return before;
  leader.cuts.insert(std::upper_bound(leader.cuts.begin(), leader.cuts.end(), position), position);
  return position;
}

}  // namespace reprise::internal
