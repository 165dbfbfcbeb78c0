// The time, behind a seam, so that tests need not wait.
// Threads: any.
#pragma once

#include <chrono>

namespace reprise {

class Clock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
};

// Never goes back.
inline const Clock& steady_clock() {
  class SteadyClock final : public Clock {
   public:
    TimePoint now() const override { return std::chrono::steady_clock::now(); }
  };
  static const SteadyClock clock;
  return clock;
}

}  // namespace reprise
