// How far a download has come: a bar on the terminal's last line, or, without a terminal, one line a file.
// Threads: one.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "reprise/hub/pull.h"

namespace reprise::app {

class PullProgressLine {
 public:
  PullProgressLine();

  void update(const PullProgress& progress);
  // A sentence of its own, above the bar.
  void note(const std::string& text);
  // Takes the bar away. May be called often.
  void finish();

 private:
  void draw(const PullProgress& progress);

  const bool on_terminal_;
  bool drawn_ = false;
  std::string file_;
  std::chrono::steady_clock::time_point last_draw_;
  // Where the measured time begins, so that bytes of an earlier run do not count as speed.
  std::chrono::steady_clock::time_point started_;
  std::uint64_t started_at_ = 0;
};

// "4.1 MiB", with three digits at most.
std::string bytes_in_words(std::uint64_t bytes);

}  // namespace reprise::app
