// Where time goes, per kind of operation. Off by default, when a scope costs one relaxed load.
// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace reprise {

struct ProfileEntry {
  std::string operation;  // "norm+linear", "attention", …
  std::int64_t calls = 0;
  double seconds = 0.0;  // wall time of the thread that ran the operation
};

class Profile {
 public:
  static void enable(bool on);
  static bool enabled() { return on_.load(std::memory_order_relaxed); }
  static void reset();
  // Sorted by time, longest first.
  static std::vector<ProfileEntry> entries();
  static void add(const char* operation, std::chrono::nanoseconds time);

 private:
  static std::atomic<bool> on_;
};

// Adds its own lifetime to `operation`, a string that outlives the process' use of it (a literal).
class ProfileScope {
 public:
  explicit ProfileScope(const char* operation)
      : operation_(Profile::enabled() ? operation : nullptr),
        start_(operation_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point()) {}
  ~ProfileScope() {
    if (operation_) Profile::add(operation_, std::chrono::steady_clock::now() - start_);
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  const char* operation_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace reprise
