// What a case needs to be built, for --only.
// Threads: free functions.
#pragma once

#include <set>
#include <string>

#include "nlohmann/json.hpp"

namespace reprise::conformance {

// Cache classes of every slot, result and layer; a rope case's kind; "quantized_sdpa" or "quantize" for those
// functions. Mask functions need nothing.
std::set<std::string> needs(const nlohmann::json& test_case);

}  // namespace reprise::conformance
