#include "apps/reprise/pull_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "apps/reprise/output.h"

namespace reprise::app {

namespace {

constexpr std::chrono::milliseconds kBetweenDraws{100};
constexpr std::size_t kBarWidth = 24;

std::string time_in_words(double seconds) {
  if (!(seconds < 360000)) return "";
  const int whole = static_cast<int>(seconds + 0.5);
  char text[32];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%d:%02d:%02d", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%d:%02d", whole / 60, whole % 60);
  }
  return text;
}

}  // namespace

std::string bytes_in_words(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text,
                unit == 0 || value >= 100 ? "%.0f %s"
                : value >= 10             ? "%.1f %s"
                                          : "%.2f %s",
                value, kUnits[unit]);
  return text;
}

PullProgressLine::PullProgressLine() : on_terminal_(::isatty(STDERR_FILENO) == 1) {}

void PullProgressLine::update(const PullProgress& progress) {
  const auto now = std::chrono::steady_clock::now();
  if (file_.empty()) {
    started_ = now;
    started_at_ = progress.total_done;
  }
  const bool new_file = progress.file != file_;
  file_ = progress.file;
  if (on_terminal_) {
    if (new_file || now - last_draw_ >= kBetweenDraws || progress.total_done == progress.total_size) {
      last_draw_ = now;
      draw(progress);
    }
  } else if (new_file) {
    print_note(progress.file + " (" + bytes_in_words(progress.file_size) + ")");
  }
}

void PullProgressLine::draw(const PullProgress& progress) {
  const double part = progress.total_size == 0
                          ? 1.0
                          : static_cast<double>(progress.total_done) / static_cast<double>(progress.total_size);
  const auto filled = static_cast<std::size_t>(std::clamp(part, 0.0, 1.0) * static_cast<double>(kBarWidth));
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - started_;
  const double rate = static_cast<double>(progress.total_done - std::min(progress.total_done, started_at_)) /
                      std::max(passed.count(), 1e-3);
  const std::uint64_t left = progress.total_size - std::min(progress.total_size, progress.total_done);
  std::string line = "\r\033[K[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] " +
                     bytes_in_words(progress.total_done) + " of " + bytes_in_words(progress.total_size) + ", " +
                     bytes_in_words(static_cast<std::uint64_t>(rate)) + "/s";
  if (rate > 0 && left > 0) line += ", " + time_in_words(static_cast<double>(left) / rate) + " left";
  std::string name = one_line(progress.file);
  if (name.size() > 32) name = "..." + name.substr(name.size() - 29);
  write_note(line + "  " + name);
  drawn_ = true;
}

void PullProgressLine::note(const std::string& text) {
  finish();
  print_note(text);
}

void PullProgressLine::finish() {
  if (!drawn_) return;
  write_note("\r\033[K");
  drawn_ = false;
}

}  // namespace reprise::app
