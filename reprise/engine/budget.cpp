#include "reprise/engine/budget.h"

#include <cstdint>
#include <cstdio>
#include <limits>

namespace reprise {
namespace internal {

std::size_t Budget::between(int tokens, int more) const {
  const std::size_t now = tokens > 0 ? runner_.bytes_of(tokens) : 0;  // nothing is held before the first
  const std::size_t then = runner_.bytes_of(more);
  return then > now ? then - now : 0;
}

bool Budget::make_room(std::size_t bytes) {
  try {
    return runner_.make_room(bytes);
  } catch (const std::exception&) {
    return false;
  }
}

bool Budget::has_room_to_spare(std::span<Sequence* const> running) {
  return make_room(promised(running) + runner_.bytes_of(1));
}

std::size_t Budget::of_start(int tokens, int reused) const {
  return reused > 0 ? between(reused, tokens) + runner_.bytes_of(1) : runner_.bytes_of(tokens);
}

std::size_t Budget::promised(std::span<Sequence* const> running) const {
  std::size_t bytes = 0;
  for (const Sequence* sequence : running) {
    bytes += between(sequence->computed, sequence->reserved);
    // A sequence that has nothing of its own yet has no recurrent state either: a page's worth covers that too.
    if (sequence->shares) bytes += runner_.bytes_of(1);
  }
  return bytes;
}

std::size_t Budget::of_decode(std::span<Sequence* const> rows, bool same_rows) const {
  std::size_t bytes = 0;
  for (const Sequence* sequence : rows) {
    const int ahead = sequence->is_ahead && (same_rows || sequence->needs_whole) ? 1 : 0;
    bytes += between(sequence->computed + ahead, sequence->after_decode());
    if (sequence->may_copy) bytes += runner_.bytes_of(1);
  }
  return bytes;
}

std::size_t Budget::of_piece(const Sequence& sequence, int end) const {
  return between(sequence.computed, end) + (sequence.may_copy ? runner_.bytes_of(1) : 0);
}

std::string in_mib(std::size_t bytes) {
  char text[40];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace internal

std::string budget_objection(const BatchRunner& runner, std::size_t prompt_tokens, int max_tokens) {
  const std::uint64_t total = prompt_tokens + static_cast<std::uint64_t>(max_tokens);
  const std::string request =
      "a prompt of " + std::to_string(prompt_tokens) + " tokens and up to " + std::to_string(max_tokens) + " new ones ";
  if (total > static_cast<std::uint64_t>(std::numeric_limits<int>::max()) - 2) return request + "are too many";
  const std::size_t need = runner.bytes_of(static_cast<int>(total));
  if (need <= runner.max_bytes()) return {};
  return request + "need " + internal::in_mib(need) + " of memory, but the budget is " +
         internal::in_mib(runner.max_bytes()) +
         ": shorten the prompt, lower max_tokens, or raise the budget (--prompt-cache-bytes)";
}

}  // namespace reprise
