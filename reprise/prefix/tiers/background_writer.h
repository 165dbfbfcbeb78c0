// Jobs done one after the other by a thread of their own, within a bound on what they hold. Private to tiers.
// Threads: any. Owns: its thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace reprise::internal {

class BackgroundWriter {
 public:
  explicit BackgroundWriter(std::size_t max_queued_bytes);
  ~BackgroundWriter();  // does what is queued
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // `job` holds `nbytes` until it is done, and does not throw. Returns: false, and nothing is queued, when that would
  // exceed the bound.
  bool push(std::function<void()> job, std::size_t nbytes);
  // Until what is queued now is done.
  void flush();

 private:
  struct Job {
    std::function<void()> run;
    std::size_t nbytes = 0;
  };
  void work();

  const std::size_t max_queued_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::size_t queued_bytes_ = 0;  // the running one's too
  std::size_t pushed_ = 0, done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace reprise::internal
