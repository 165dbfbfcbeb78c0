// What one step or function answered, before it is compared with what the trace expects.
// Threads: values.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "nlohmann/json.hpp"
#include "reprise/cache/state.h"
#include "reprise/nn/keys_values.h"

namespace reprise::conformance {

using Json = nlohmann::json;
using Arrays = std::vector<mlx::core::array>;

struct Observation {
  std::optional<std::string> error;
  std::map<std::string, Arrays> arrays;  // keys, values, in_keys, in_values, out, dequantized, queries_after, quantized
  std::optional<Mask> mask;
  std::optional<std::optional<mlx::core::array>> entry;  // of `get`; the inner one is none when unset
  std::map<std::string, Json> scalars;                   // result, can_trim, metadata, classes
  std::optional<Json> after;
  std::optional<State> state;
  std::optional<State> legacy_state;
  std::optional<Meta> legacy_meta;
  // Deviations that no expectation names: a refused step that changed something, a reload that is not the identity.
  std::vector<std::string> defects;
  // The cache went through a file, which holds valid rows only: its capacity is its own from then on.
  bool own_capacity = false;
};

// What a call that threw answered; called in its catch block. Only the library's own error counts as a refusal:
// anything else, such as an operation that nobody knows, is a defect, also where an error is expected.
Observation refusal();

// One array, or an affine triple.
Arrays keys_of(const KeysValues& keys_values);
Arrays values_of(const KeysValues& keys_values);

}  // namespace reprise::conformance
