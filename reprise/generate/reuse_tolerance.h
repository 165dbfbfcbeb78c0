// What the check of reused caches compares, and how far a warm run may be from a cold one; see
// GenerateOptions::verify_reuse. Threads: free functions; a call evaluates on the calling thread.
#pragma once

#include <optional>
#include <span>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/base/tokens.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

// A part of `rate` (0 … 1) of all reused prefixes is chosen, by their tokens: a repeated run checks the same ones.
bool is_chosen_for_check(std::span<const TokenId> tokens, double rate);

// max|warm - cold| / max|cold|; not a number where they are not numbers.
double reuse_error(const mlx::core::array& warm, const mlx::core::array& cold);

// What that may be for logits in `computed` over caches that hold numbers in `stored`, quantised so.
double reuse_tolerance(mlx::core::Dtype computed, std::span<const mlx::core::Dtype> stored,
                       const std::optional<KVQuantization>& quantization);

}  // namespace reprise
