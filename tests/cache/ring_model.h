// A sliding-window cache as a list of tokens: what its rules make visible, told from the history alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace reprise::cache_test {

struct RingModel {
  int max_size;
  int keep;
  std::vector<int> tokens = {};  // all that were ever given and not trimmed

  int offset() const { return static_cast<int>(tokens.size()); }

  // The kept ones and the most recent others, `count` in all.
  std::vector<int> most_recent(int count) const {
    if (offset() <= count) return tokens;
    std::vector<int> seen(tokens.begin(), tokens.begin() + keep);
    seen.insert(seen.end(), tokens.end() - (count - keep), tokens.end());
    return seen;
  }

  // What an update with these tokens must return, in temporal order. Becomes the history after it.
  std::vector<int> append(const std::vector<int>& added) {
    std::vector<int> seen;
    if (added.size() > 1) {
      seen = most_recent(max_size - 1);
      seen.insert(seen.end(), added.begin(), added.end());
      tokens.insert(tokens.end(), added.begin(), added.end());
    } else {
      tokens.insert(tokens.end(), added.begin(), added.end());
      seen = most_recent(max_size);
    }
    return seen;
  }

  // Returns: how many trim(n) must report.
  int trim(int n) {
    const int trimmed = offset() < max_size ? std::min(n, offset()) : 0;
    tokens.resize(tokens.size() - static_cast<std::size_t>(trimmed));
    return trimmed;
  }
};

}  // namespace reprise::cache_test
