// Finds stop strings in a stream of text and holds back what might still become one. Private to `generate`.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reprise::internal {

class StopMatcher {
 public:
  // Throws: invalid_argument for an empty stop string.
  explicit StopMatcher(std::vector<std::string> stop);

  // Returns: the text that can no longer be part of a stop string. After a match: the text before it, then nothing
  // more.
  std::string add(std::string_view piece);

  bool matched() const { return matched_; }

  // The stream has ended. Returns: what was held back; nothing after a match.
  std::string finish();

 private:
  // Bytes at the end of held_ that are a proper prefix of some stop string.
  std::size_t undecided() const;

  std::vector<std::string> stop_;
  std::string held_;  // invariant between calls: a proper prefix of some stop string, or empty
  bool matched_ = false;
};

}  // namespace reprise::internal
