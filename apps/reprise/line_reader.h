// What the user types into a chat, one message at a time: with a line editor on a terminal, else from a pipe or file.
// Threads: one.
#pragma once

#include <memory>
#include <string>

#include "apps/reprise/interrupts.h"

namespace reprise::app {

struct Input {
  enum class Kind {
    text,         // a message, without the newline at its end; on a terminal it may hold several lines
    interrupted,  // Ctrl-C while waiting
    end,
  };
  Kind kind = Kind::end;
  std::string text = {};
};

class LineReader {
 public:
  virtual ~LineReader() = default;
  virtual Input read() = 0;
  // A person sits at a terminal.
  virtual bool is_interactive() const = 0;
};

// Lines of standard input: LF or CRLF; a last line without either counts.
std::unique_ptr<LineReader> make_pipe_line_reader(Interrupts& interrupts);

// The prompt `>> `, editing, a history that is kept in a file, multi-line paste. Null where standard input or both
// outputs are no terminal.
std::unique_ptr<LineReader> make_terminal_line_reader(Interrupts& interrupts);

}  // namespace reprise::app
