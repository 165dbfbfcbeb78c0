// The sample that prompt-cache files are exchanged with: rows whose numbers follow from their place, exact in every
// floating dtype. tests/oracle/prompt_cache_interchange.py has the same rule.
// Threads: free functions.
#pragma once

#include "mlx/array.h"
#include "reprise/cache/prompt_cache.h"

namespace reprise::cache_test {

constexpr int kSampleHeads = 2;
constexpr int kSampleKeySize = 4;
constexpr int kSampleValueSize = 6;

struct SampleRows {
  mlx::core::array keys;    // [1, kSampleHeads, end - begin, kSampleKeySize]
  mlx::core::array values;  // [1, kSampleHeads, end - begin, kSampleValueSize]
};

// Rows begin … end - 1 of a layer: ((31·layer + 7·row + 3·head + feature) mod 251) / 8, values negated.
SampleRows sample_rows(int layer, int begin, int end, mlx::core::Dtype dtype);

// Appends `count` rows to each layer, at its position. Returns: what each layer then shows.
std::vector<SampleRows> append_sample(PromptCache& cache, int count, mlx::core::Dtype dtype);

}  // namespace reprise::cache_test
