// Where a trace contradicts what it is said to record, or records what the caches' rules answer differently: each
// place, with its reason. Everything else of such a case is compared as it stands.
// Threads: free functions.
#pragma once

#include <cstddef>

#include "nlohmann/json.hpp"

namespace reprise::conformance {

// What step `index` of `test_case` must answer.
nlohmann::json expectation(const nlohmann::json& test_case, std::size_t index);

}  // namespace reprise::conformance
