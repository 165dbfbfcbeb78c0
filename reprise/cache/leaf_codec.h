// Leaves of a state that are not arrays, as the small tensors which stand for them in the current file layout.
// Threads: free functions; arrays come back evaluated.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"
#include "reprise/cache/state.h"

namespace reprise::internal {

struct EncodedLeaf {
  mlx::core::array tensor;
  const char* kind;  // null for an array, which stands for itself
};

// Requires: `leaf` is not a list. Throws: invalid_argument for a string that is not UTF-8.
EncodedLeaf encode_leaf(const State& leaf);

// Throws: corrupt_data for a kind not known or a tensor that does not fit it; `name` is the tensor's.
State decode_leaf(const std::string& name, const std::string& kind, const mlx::core::array& tensor);

}  // namespace reprise::internal
