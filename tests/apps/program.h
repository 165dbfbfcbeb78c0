// The program `reprise` as a child process, through pipes or a pseudo-terminal.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace reprise::test {

struct Outcome {
  int exit_code = -1;  // 128 + the signal's number where a signal ended it
  std::string out;
  std::string err;
};

struct LaunchOptions {
  std::map<std::string, std::string> environment = {};  // added to ours; "" takes a variable away
  bool pseudo_terminal = false;                         // all three streams; `out` then holds what the screen got
  std::optional<std::string> output_file = {};          // standard output goes there
};

// Threads: one. The child is killed when the object goes.
class Program {
 public:
  explicit Program(const std::vector<std::string>& arguments, const LaunchOptions& options = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void write(const std::string& text);
  void close_input();
  void close_output();
  void signal(int number);

  // Reads until `text` has come on standard output (or error) after what earlier calls waited for. False: the time is
  // over or the program has ended without it.
  bool wait_for_output(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(120));
  bool wait_for_error(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(120));

  // Closes the input and waits for the end.
  Outcome finish(std::chrono::seconds limit = std::chrono::seconds(240));

  const std::string& out() const { return outcome_.out; }
  const std::string& err() const { return outcome_.err; }

 private:
  bool pump(std::chrono::steady_clock::time_point until);
  bool wait_for(const std::string& all, std::size_t& seen, const std::string& text, std::chrono::seconds limit);

  pid_t child_ = -1;
  int input_ = -1;
  int output_ = -1;
  int error_ = -1;
  std::size_t seen_output_ = 0;
  std::size_t seen_error_ = 0;
  Outcome outcome_;
};

// Runs it to its end with `input` as standard input.
Outcome run_program(const std::vector<std::string>& arguments, const std::string& input = "",
                    const LaunchOptions& options = {});

// The small model, or none: then a test skips.
std::optional<std::string> small_model();

// A folder of its own for a test, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

int count_lines(const std::string& text);

// The numbers of a `stats {…}` line, the nth of `err`.
std::map<std::string, double> stats_of(const std::string& err, int n);

}  // namespace reprise::test

#define REPRISE_NEED_MODEL(name)                                                                    \
  const auto name##_found = ::reprise::test::small_model();                                         \
  if (!name##_found) GTEST_SKIP() << "the small model is not there: set REPRISE_MODEL or ./run it"; \
  const std::string name = *name##_found
