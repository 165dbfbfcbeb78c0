#include "apps/reprise/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise::app {
namespace {

// Returns: 0, or the errno of the write that failed.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

void prepare_standard_streams() {
  // For reading only, also in place of the output: writing there must fail, not vanish.
  for (const int descriptor : {0, 1, 2}) {
    if (::fcntl(descriptor, F_GETFD) == -1 && errno == EBADF) ::open("/dev/null", O_RDONLY);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

void write_answer(std::string_view text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == EPIPE) throw OutputClosed();
  if (error != 0) {
    throw Error(ErrorCode::internal, std::string("cannot write to standard output: ") + std::strerror(error));
  }
}

void write_note(std::string_view text) { write_all(STDERR_FILENO, text); }

void print_note(const std::string& text) { write_note(text + "\n"); }

std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    if (!control) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

void print_error(const std::string& command, const std::string& text) {
  print_note("reprise" + (command.empty() ? "" : " " + command) + ": " + one_line(text));
}

std::string stats_line(const GenerateStats& stats) {
  char line[256];
  std::snprintf(line, sizeof line,
                "stats {\"prompt_tokens\":%d,\"cached_tokens\":%d,\"completion_tokens\":%d,\"ttft_ms\":%.1f,"
                "\"prefill_tps\":%.2f,\"decode_tps\":%.2f}",
                stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
                stats.time_to_first_token.count() * 1000, stats.prefill_tps(), stats.decode_tps());
  if (stats.reuse_checks == 0) return line;
  char checks[128];
  std::snprintf(checks, sizeof checks, ",\"reuse_checks\":%d,\"reuse_mismatches\":%d,\"reuse_error\":%.3g}",
                stats.reuse_checks, stats.reuse_mismatches, stats.reuse_error);
  std::string text = line;
  text.pop_back();
  return text + checks;
}

void show_log() {
  set_log_hook([](LogLevel level, const std::string& message) {
    if (level == LogLevel::warning) print_error("", "warning: " + message);
    if (level == LogLevel::error) print_error("", "error: " + message);
  });
}

}  // namespace reprise::app
