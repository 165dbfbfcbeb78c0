#include "tests/apps/program.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __APPLE__
#include <util.h>
#else
#include <pty.h>
#endif

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace reprise::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void execute(const std::vector<std::string>& arguments, const LaunchOptions& options) {
  for (const auto& [name, value] : options.environment) {
    if (value.empty()) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<char*> argv = {const_cast<char*>("reprise")};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::signal(SIGPIPE, SIG_DFL);
  ::execv(REPRISE_PROGRAM, argv.data());
  ::_exit(127);
}

void close_once(int& descriptor) {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

// Returns: false at the end of the stream.
bool read_some(int descriptor, std::string& into) {
  char bytes[4096];
  const ssize_t got = ::read(descriptor, bytes, sizeof bytes);
  if (got > 0) into.append(bytes, static_cast<std::size_t>(got));
  return got > 0 || (got < 0 && errno == EINTR);
}

}  // namespace

Program::Program(const std::vector<std::string>& arguments, const LaunchOptions& options) {
  std::signal(SIGPIPE, SIG_IGN);
  if (options.pseudo_terminal) {
    const winsize size = {24, 80, 0, 0};
    child_ = ::forkpty(&output_, nullptr, nullptr, &size);
    if (child_ < 0) throw std::runtime_error("forkpty failed");
    if (child_ == 0) execute(arguments, options);
    input_ = ::dup(output_);
    return;
  }
  int in[2];
  int out[2];
  int err[2];
  if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe failed");
  }
  child_ = ::fork();
  if (child_ < 0) throw std::runtime_error("fork failed");
  if (child_ == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(options.output_file ? ::open(options.output_file->c_str(), O_WRONLY) : out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    execute(arguments, options);
  }
  ::close(in[0]);
  ::close(out[1]);
  ::close(err[1]);
  input_ = in[1];
  output_ = out[0];
  error_ = err[0];
}

Program::~Program() {
  if (child_ > 0) {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  close_once(input_);
  close_once(output_);
  close_once(error_);
}

void Program::write(const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = ::write(input_, text.data() + done, text.size() - done);
    if (written < 0 && errno != EINTR) return;  // the program has gone: the test sees it elsewhere
    if (written > 0) done += static_cast<std::size_t>(written);
  }
}

void Program::close_input() { close_once(input_); }

void Program::close_output() { close_once(output_); }

void Program::signal(int number) { ::kill(child_, number); }

// Reads what there is. Returns: false when both streams have ended or the time is over.
bool Program::pump(Clock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
  if (left <= 0 || (output_ < 0 && error_ < 0)) return false;
  pollfd waiting[2] = {{output_, POLLIN, 0}, {error_, POLLIN, 0}};
  if (::poll(waiting, 2, static_cast<int>(std::min<long>(left, 1000))) < 0) return errno == EINTR;
  if (waiting[0].revents != 0 && !read_some(output_, outcome_.out)) close_once(output_);
  if (waiting[1].revents != 0 && !read_some(error_, outcome_.err)) close_once(error_);
  return true;
}

bool Program::wait_for(const std::string& all, std::size_t& seen, const std::string& text, std::chrono::seconds limit) {
  const auto until = Clock::now() + limit;
  for (;;) {
    if (const auto found = all.find(text, seen); found != std::string::npos) {
      seen = found + text.size();
      return true;
    }
    if (!pump(until)) return false;
  }
}

bool Program::wait_for_output(const std::string& text, std::chrono::seconds limit) {
  return wait_for(outcome_.out, seen_output_, text, limit);
}

bool Program::wait_for_error(const std::string& text, std::chrono::seconds limit) {
  return wait_for(outcome_.err, seen_error_, text, limit);
}

Outcome Program::finish(std::chrono::seconds limit) {
  if (error_ >= 0) close_input();  // of a pseudo-terminal input and output are one: it stays open
  const auto until = Clock::now() + limit;
  while (pump(until)) {
  }
  int status = 0;
  pid_t done = 0;
  while ((done = ::waitpid(child_, &status, WNOHANG)) == 0 && Clock::now() < until) ::usleep(2000);
  if (done == child_) {
    child_ = -1;
    outcome_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return outcome_;
}

Outcome run_program(const std::vector<std::string>& arguments, const std::string& input, const LaunchOptions& options) {
  Program program(arguments, options);
  program.write(input);
  return program.finish();
}

std::optional<std::string> small_model() {
  const char* named = std::getenv("REPRISE_MODEL");
  const std::string path =
      named != nullptr && *named != '\0' ? named : REPRISE_SOURCE_DIR "/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return std::filesystem::exists(path) ? std::optional(path) : std::nullopt;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "reprise_test_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

int count_lines(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

std::map<std::string, double> stats_of(const std::string& err, int n) {
  std::size_t at = 0;
  for (int i = 0; i <= n; ++i) {
    at = err.find("stats {", at);
    if (at == std::string::npos) return {};
    at += 7;
  }
  std::map<std::string, double> numbers;
  std::istringstream members(err.substr(at, err.find('}', at) - at));
  for (std::string member; std::getline(members, member, ',');) {
    const auto colon = member.find(':');
    numbers[member.substr(1, colon - 2)] = std::stod(member.substr(colon + 1));
  }
  return numbers;
}

}  // namespace reprise::test
