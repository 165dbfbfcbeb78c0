#include "apps/reprise/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "apps/reprise/output.h"

namespace reprise::app {
namespace {

constexpr int kBarWidth = 24;
constexpr auto kPatience = std::chrono::seconds(1);
constexpr auto kTick = std::chrono::milliseconds(500);

}  // namespace

Progress::Progress(std::string what) : what_(std::move(what)), visible_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { finish(); }

void Progress::update(int done, int total) {
  if (!visible_) return;
  const std::lock_guard lock(mutex_);
  if (finished_) {
    finished_ = false;
    started_ = std::chrono::steady_clock::now();
    ticker_ = std::thread([this] {
      std::unique_lock waiting(mutex_);
      while (!changed_.wait_for(waiting, kTick, [this] { return finished_; })) {
        if (std::chrono::steady_clock::now() - started_ >= kPatience) draw();
      }
    });
  }
  done_ = done;
  total_ = total;
  // The last token is always a step of its own: up to it, one chunk may have been all.
  if (drawn_ || (done > 0 && done + 1 < total)) draw();
}

void Progress::finish() {
  {
    const std::lock_guard lock(mutex_);
    if (finished_) return;
    finished_ = true;
    if (drawn_) write_note("\r\033[K");
    drawn_ = false;
  }
  changed_.notify_all();
  ticker_.join();
}

void Progress::draw() {
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started_;
  const int filled = total_ == 0 ? 0 : static_cast<int>(static_cast<long>(kBarWidth) * done_ / total_);
  std::string bar(static_cast<std::size_t>(filled), '#');
  bar.resize(kBarWidth, '.');
  char line[160];
  std::snprintf(line, sizeof line, "\r%s [%s] %d/%d tokens  %.0f s\033[K", what_.c_str(), bar.c_str(), done_, total_,
                elapsed.count());
  write_note(line);
  drawn_ = true;
}

}  // namespace reprise::app
