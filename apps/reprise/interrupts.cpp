#include "apps/reprise/interrupts.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "apps/reprise/output.h"
#include "reprise/base/error.h"

namespace reprise::app {
namespace {

constexpr char kInterrupt = 'i';
constexpr char kEnd = 'e';

std::atomic<int> handler_descriptor = -1;
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may use it");

void on_interrupt(int) {
  const int saved = errno;
  // A full pipe holds interrupts enough.
  [[maybe_unused]] const auto written = ::write(handler_descriptor.load(), &kInterrupt, 1);
  errno = saved;
}

void open_pipe(int (&pipe)[2], bool reader_waits) {
  if (::pipe(pipe) != 0) throw Error(ErrorCode::resource_exhausted, "cannot make a pipe for signals");
  for (const int descriptor : pipe) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  ::fcntl(pipe[1], F_SETFL, O_NONBLOCK);
  if (!reader_waits) ::fcntl(pipe[0], F_SETFL, O_NONBLOCK);
}

}  // namespace

Interrupts::Interrupts() {
  open_pipe(signals_, /*reader_waits=*/true);
  open_pipe(wake_, /*reader_waits=*/false);
  handler_descriptor = signals_[1];
  watcher_ = std::thread([this] { watch(); });
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &action, &previous_);
}

Interrupts::~Interrupts() {
  ::sigaction(SIGINT, &previous_, nullptr);
  [[maybe_unused]] const auto written = ::write(signals_[1], &kEnd, 1);
  watcher_.join();
  handler_descriptor = -1;
  for (const int descriptor : {signals_[0], signals_[1], wake_[0], wake_[1]}) ::close(descriptor);
}

std::stop_token Interrupts::begin_work() {
  const std::lock_guard lock(mutex_);
  work_ = std::stop_source();
  working_ = true;
  if (take_wake()) work_.request_stop();  // it came just after the input that began this work
  return work_.get_token();
}

void Interrupts::end_work() {
  const std::lock_guard lock(mutex_);
  working_ = false;
}

bool Interrupts::take_wake() {
  char bytes[64];
  bool found = false;
  while (::read(wake_[0], bytes, sizeof bytes) > 0) found = true;
  return found;
}

int Interrupts::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

void Interrupts::reset() {
  const std::lock_guard lock(mutex_);
  count_ = 0;
}

void Interrupts::watch() {
  // Interrupts are for the thread that waits for them in a system call; here they would only get in the way.
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (char byte = 0;;) {
    const auto got = ::read(signals_[0], &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1 || byte == kEnd) return;
    const std::lock_guard lock(mutex_);
    ++count_;
    if (!working_) {
      [[maybe_unused]] const auto written = ::write(wake_[1], &byte, 1);
    } else if (!work_.request_stop() || count_ > 1) {
      write_note("\n");
      ::_exit(kInterrupted);
    }
  }
}

}  // namespace reprise::app
