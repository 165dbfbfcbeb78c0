// Observations against expectations, by the rules of the traces' README.
// Threads: free functions.
#pragma once

#include <string>
#include <vector>

#include "tests/conformance/observation.h"
#include "tests/conformance/trace.h"

namespace reprise::conformance {

// Every difference, first one first; empty when all is as expected.
std::vector<std::string> compare(const Observation& got, const Json& expect, const Family& family);

// The first difference of two states, bit by bit; empty when there is none.
std::string compare_states(const State& got, const State& want);

// `after` of a trace: fields that it lacks are not prescribed.
std::vector<std::string> compare_scalars(const Json& got, const Json& want, bool own_capacity, const std::string& path);

}  // namespace reprise::conformance
