// What the kit says of a model's caches (class, offset, bytes, shapes), read from ours in the same words.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "reprise/cache/prompt_cache.h"

namespace reprise::test {

nlohmann::json facts_of(const PromptCache& cache);

// Whether the caches hold what the kit's oracle held in the same dtype: then bytes and dtypes are compared too.
enum class StoredAs { the_oracle, another_dtype };

// The first difference from what the kit says, in words; empty: none. What `want` does not name is not compared.
std::string differing_fact(const nlohmann::json& got, const nlohmann::json& want, StoredAs stored);

}  // namespace reprise::test
