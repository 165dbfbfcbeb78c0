#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "apps/reprise/line_reader.h"
#include "reprise/base/error.h"

namespace reprise::app {
namespace {

class PipeLineReader final : public LineReader {
 public:
  explicit PipeLineReader(Interrupts& interrupts) : interrupts_(interrupts) {}

  bool is_interactive() const override { return false; }

  Input read() override {
    for (;;) {
      if (const auto newline = buffer_.find('\n', searched_); newline != std::string::npos) {
        return {Input::Kind::text, take(newline, newline + 1)};
      }
      searched_ = buffer_.size();
      if (ended_) {
        if (buffer_.empty()) return {};
        return {Input::Kind::text, take(buffer_.size(), buffer_.size())};
      }
      if (!wait()) return {Input::Kind::interrupted};
      fill();
    }
  }

 private:
  // Returns: false when an interrupt came instead of input.
  bool wait() {
    pollfd waiting[2] = {{STDIN_FILENO, POLLIN, 0}, {interrupts_.wake_descriptor(), POLLIN, 0}};
    while (::poll(waiting, 2, -1) < 0 && errno == EINTR) {
    }
    if ((waiting[1].revents & POLLIN) == 0) return true;
    interrupts_.take_wake();
    return false;
  }

  void fill() {
    char bytes[4096];
    ssize_t got = 0;
    do {
      got = ::read(STDIN_FILENO, bytes, sizeof bytes);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
      throw Error(ErrorCode::internal, std::string("cannot read standard input: ") + std::strerror(errno));
    }
    ended_ = got == 0;
    buffer_.append(bytes, static_cast<std::size_t>(got));
  }

  // The first `length` bytes without a CR at their end; drops `consumed` bytes.
  std::string take(std::size_t length, std::size_t consumed) {
    std::string line = buffer_.substr(0, length);
    if (line.ends_with('\r')) line.pop_back();
    buffer_.erase(0, consumed);
    searched_ = 0;
    return line;
  }

  Interrupts& interrupts_;
  std::string buffer_;
  std::size_t searched_ = 0;  // bytes of buffer_ known to hold no newline
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<LineReader> make_pipe_line_reader(Interrupts& interrupts) {
  return std::make_unique<PipeLineReader>(interrupts);
}

}  // namespace reprise::app
