// How far a long prefill has come, on the terminal's last line. Without a terminal on standard error: nothing.
// Threads: made and used by one thread; it draws from one of its own as well, since a chunk can take long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace reprise::app {

class Progress {
 public:
  // `what`: the word before the bar.
  explicit Progress(std::string what);
  ~Progress();

  // done of total tokens. Shown from the second chunk on, or after a second.
  void update(int done, int total);
  // Takes the line away again. May be called often.
  void finish();

 private:
  void draw();

  const std::string what_;
  const bool visible_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point started_;  // guarded by mutex_, as all below
  int done_ = 0;
  int total_ = 0;
  bool drawn_ = false;
  bool finished_ = true;
  std::thread ticker_;
};

}  // namespace reprise::app
