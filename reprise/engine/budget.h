// The arithmetic of the memory budget: what running sequences may still come to hold. Private to `engine`.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "reprise/engine/batch_runner.h"
#include "reprise/engine/sequence.h"

namespace reprise::internal {

class Budget {
 public:
  explicit Budget(BatchRunner& runner) : runner_(runner) {}

  // What a sequence of `tokens` tokens takes that finds the first `reused` stored, one page to copy included.
  std::size_t of_start(int tokens, int reused) const;
  // What has been promised to running sequences and is not yet taken.
  std::size_t promised(std::span<Sequence* const> running) const;
  // What the next decode step takes, and the one that may begin ahead. What has begun ahead counts as taken where it is
  // sure to stand: the rows are those of the last step, or it is only our own room.
  std::size_t of_decode(std::span<Sequence* const> rows, bool same_rows) const;
  std::size_t of_piece(const Sequence& sequence, int end) const;

  bool make_room(std::size_t bytes);
  // Room beyond what is promised, for one more recurrent state.
  bool has_room_to_spare(std::span<Sequence* const> running);

 private:
  std::size_t between(int tokens, int more) const;

  BatchRunner& runner_;
};

// "12.5 MiB"
std::string in_mib(std::size_t bytes);

}  // namespace reprise::internal
