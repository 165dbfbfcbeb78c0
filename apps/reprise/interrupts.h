// Ctrl-C: the first one stops the answer that is being made, the second one in a row leaves.
// A signal handler may call next to nothing, so it only writes a byte into a pipe; a thread of this object reads the
// pipe and asks the answer's std::stop_source to stop. Threads: made and used by one thread; one object at a time.
#pragma once

#include <csignal>
#include <mutex>
#include <stop_token>
#include <thread>

namespace reprise::app {

class Interrupts {
 public:
  // Takes SIGINT over until the object goes.
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // Interrupts between the two calls stop the returned token, as does one before that nobody has taken; the second one
  // since reset() ends the program with exit code kInterrupted.
  std::stop_token begin_work();
  void end_work();

  // Becomes readable by an interrupt outside of work. Drained by take_wake.
  int wake_descriptor() const { return wake_[0]; }
  // Returns: whether there was one.
  bool take_wake();

  // Interrupts since the last call of reset().
  int count() const;
  void reset();

 private:
  void watch();

  int signals_[2] = {-1, -1};  // handler → watcher
  int wake_[2] = {-1, -1};     // watcher → whoever waits for input
  mutable std::mutex mutex_;
  std::stop_source work_;  // guarded by mutex_
  bool working_ = false;   // guarded by mutex_
  int count_ = 0;          // guarded by mutex_
  struct sigaction previous_ = {};
  std::thread watcher_;
};

}  // namespace reprise::app
