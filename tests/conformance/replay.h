// One case from its beginning to its first failing step.
// Threads: free functions.
#pragma once

#include <optional>
#include <string>

#include "tests/conformance/trace.h"

namespace reprise::conformance {

struct Failure {
  std::optional<std::size_t> step;  // none: before the first step
  std::string what;                 // the first difference
};

// None when everything is as expected. Never throws.
std::optional<Failure> replay(const Json& test_case, const Family& family);

}  // namespace reprise::conformance
