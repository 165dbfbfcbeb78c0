// How long the random tests run, and which history: REPRISE_FUZZ_OPERATIONS=N, REPRISE_FUZZ_SEED=N.
// Threads: free functions.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <string>

namespace reprise::cache_test {

// The sanitizers make each operation about ten times dearer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kDefaultOperations = 1000;
#else
inline constexpr int kDefaultOperations = 10000;
#endif

inline int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

inline unsigned random_seed() { return static_cast<unsigned>(from_environment("REPRISE_FUZZ_SEED", 7)); }

// `history` has step(), one operation with its checks, and check_all().
template <typename History>
void run_random_history(History& history) {
  const int operations = from_environment("REPRISE_FUZZ_OPERATIONS", kDefaultOperations);
  for (int i = 0; i < operations; ++i) {
    SCOPED_TRACE("operation " + std::to_string(i));
    try {
      history.step();
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  history.check_all();
}

}  // namespace reprise::cache_test
