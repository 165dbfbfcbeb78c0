// What other threads ask of the engine thread: done in order, between two steps. Private to `engine`.
// Threads: any, internally locked.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "reprise/engine/scheduler.h"

namespace reprise::internal {

class Inbox {
 public:
  // Must not throw.
  using Command = std::function<void(Scheduler&)>;

  // Returns: false, and the command is never run, when it is closed.
  bool post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return false;
      commands_.push_back(std::move(command));
    }
    changed_.notify_one();
    return true;
  }

  // All that have come. Waits for one, or for the end, as long as `patience`.
  std::vector<Command> take(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    if (patience.count() > 0) changed_.wait_for(lock, patience, [&] { return closed_ || !commands_.empty(); });
    return std::exchange(commands_, {});
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_one();
  }
  bool closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

  // Requests that wait: posted and not yet taken, and those of the scheduler after its last step.
  std::atomic<int> num_posted{0};
  std::atomic<int> num_waiting{0};

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Command> commands_;  // guarded by mutex_
  bool closed_ = false;            // guarded by mutex_
};

}  // namespace reprise::internal
