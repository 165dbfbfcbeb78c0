// Differences between arrays, said in a person's words.
// Threads: free functions; arrays are evaluated.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"

namespace reprise::conformance {

struct ArrayRules {
  double tolerance = 0.0;                      // |got - want| ≤ tolerance · (1 + |want|)
  bool token_set = false;                      // [B, H, tokens, D]: order along the tokens is free
  std::optional<mlx::core::array> valid = {};  // bool [B, tokens]: only these columns count
  std::optional<mlx::core::array> care = {};   // bool, of the arrays' shape: only these elements count
};

// The first difference; empty when there is none.
std::string compare_arrays(const mlx::core::array& got, const mlx::core::array& want, const ArrayRules& rules = {});

std::string describe(const mlx::core::array& array);

}  // namespace reprise::conformance
