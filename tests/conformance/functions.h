// Function cases of the traces: masks, rotary embeddings, quantised attention, quantisation.
// Threads: free functions.
#pragma once

#include "tests/conformance/observation.h"
#include "tests/conformance/trace.h"

namespace reprise::conformance {

// Never throws: what the function threw is in the observation.
Observation call_function(const Json& test_case, const Family& family);

// `type`, else `rope_type`, else "default".
std::string rope_kind(const Json& args);

}  // namespace reprise::conformance
