#include "reprise/generate/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "reprise/base/error.h"

namespace reprise::internal {

StopMatcher::StopMatcher(std::vector<std::string> stop) : stop_(std::move(stop)) {
  for (const std::string& text : stop_) {
    if (text.empty()) throw Error(ErrorCode::invalid_argument, "[generate] a stop string must not be empty");
  }
}

std::string StopMatcher::add(std::string_view piece) {
  if (matched_) return {};
  held_ += piece;
  // The stop string that is complete first, so that the cut does not depend on how the text came in pieces.
  std::size_t begin = std::string::npos;
  std::size_t end = std::string::npos;
  for (const std::string& text : stop_) {
    const std::size_t at = held_.find(text);
    if (at == std::string::npos) continue;
    if (at + text.size() < end || (at + text.size() == end && at < begin)) {
      begin = at;
      end = at + text.size();
    }
  }
  if (begin != std::string::npos) {
    matched_ = true;
    return std::exchange(held_, {}).substr(0, begin);
  }
  const std::size_t certain = held_.size() - undecided();
  std::string out = held_.substr(0, certain);
  held_.erase(0, certain);
  return out;
}

std::size_t StopMatcher::undecided() const {
  std::size_t longest = 0;
  for (const std::string& text : stop_) {
    for (std::size_t n = std::min(text.size() - 1, held_.size()); n > longest; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(text).substr(0, n)) longest = n;
    }
  }
  return longest;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace reprise::internal
