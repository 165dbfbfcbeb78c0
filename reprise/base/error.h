// The one exception type of the library: a code for programs and a message for people.
// Threads: values, freely copied.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace reprise {

// What kind of thing went wrong. A caller decides by this, never by the text.
enum class ErrorCode {
  invalid_argument,     // a bad argument, shape or flag: the caller can mend it
  failed_precondition,  // the right call at the wrong time
  not_found,            // a file, tensor, tool or name that is not there
  unsupported,          // understood, but not implemented (named in the message)
  corrupt_data,         // a file that is damaged or not what it claims to be
  resource_exhausted,   // memory, disk or a stated budget
  cancelled,            // the caller asked for the end
  internal,             // a defect of this library
};

// The code's name as written above, for logs ("invalid_argument").
std::string_view to_string(ErrorCode code);

// Text form: `[function] what, but got <value>`.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace reprise
