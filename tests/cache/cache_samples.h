// One cache of every class in every state that a file must hold, and what it shows when it goes on.
// Threads: free functions.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reprise/cache/layer_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise::cache_test {

struct CacheSample {
  std::string name;
  RowShape shape;  // of the rows that it holds, and of those it is to get
  std::function<std::unique_ptr<LayerCache>()> make;
  std::string not_in_legacy = {};  // words of the refusal; empty: that layout holds it
};

std::vector<CacheSample> cache_samples();

// What `cache` answers, and its masks, rows and parts over three updates, a trim and the operations of batches, in
// order; a call that throws answers with its message. Lists answer child by child.
State::List go_on(LayerCache& cache, const RowShape& shape);

// "" when both say the same, else the first place where they do not.
std::string first_difference(const State& a, const State& b, const std::string& where = "");

}  // namespace reprise::cache_test
