// Prompt caches whose rows say which token at which position they are of.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "mlx/array.h"
#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/prefix/tiers/cache_leaves.h"

namespace reprise::test {

struct FormOptions {
  bool recurrent = true;
  std::optional<KVQuantization> quantization = {};
};
// Full attention, a window, chunks; with `recurrent` the latter in a list with recurrent state of three slots.
PromptCache make_form(const std::shared_ptr<PagePool>& pool, const FormOptions& options = {});

// Appends tokens[length of the cache …]; evaluated. Recurrent state sums tokens; its last slot stays unset.
void fill(PromptCache& cache, std::span<const TokenId> tokens);

Tokens counted_tokens(int count, int first = 0);

// What differs between two caches' rows and state; empty: nothing. Rows that only one of them still has are passed
// over.
std::string difference(const PromptCache& got, const PromptCache& want);

}  // namespace reprise::test
