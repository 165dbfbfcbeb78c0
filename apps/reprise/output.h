// What the program writes: answers to standard output, everything else to standard error.
// Threads: any.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "reprise/generate/generate.h"

namespace reprise::app {

// Exit codes.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kWrongUsage = 2;
inline constexpr int kInterrupted = 130;  // as shells report a program that Ctrl-C ended

// A command line that cannot be meant: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whoever read our output has gone: there is nothing left to do, and nothing to complain about.
class OutputClosed : public std::exception {
 public:
  const char* what() const noexcept override { return "standard output is closed"; }
};

// Opens /dev/null for each of the descriptors 0 to 2 that is closed, so that no file of ours gets its number, and
// ignores SIGPIPE and SIGXFSZ, so that a reader who goes away and a file beyond the limit are errors of write().
void prepare_standard_streams();

// Writes all of it at once, past any buffer. Throws: OutputClosed; Error (internal) when it cannot be written.
void write_answer(std::string_view text);

// To standard error, as it is; never throws.
void write_note(std::string_view text);

// One line to standard error; never throws.
void print_note(const std::string& text);

// `reprise COMMAND: what went wrong`, on one line whatever the text holds.
void print_error(const std::string& command, const std::string& text);
std::string one_line(std::string_view text);

// The line of --stats.
std::string stats_line(const GenerateStats& stats);

// Sends the library's warnings and errors to standard error.
void show_log();

}  // namespace reprise::app
