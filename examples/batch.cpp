// Two sequences of different lengths in one batch of every kind of layer, and a rewind that no trim could do. Needs no
// model: the keys and values are made up.
#include <iostream>
#include <memory>

#include "mlx/ops.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/cache/snapshots.h"

namespace mx = mlx::core;

namespace {

// One layer that keeps everything, one that keeps the first 4 and the most recent 28 tokens.
reprise::PromptCache make_cache() {
  reprise::PromptCache cache;
  cache.push_back(std::make_unique<reprise::KVCache>());
  cache.push_back(std::make_unique<reprise::RotatingKVCache>(32, 4));
  return cache;
}

// What a model's forward does with a cache: every layer stores its keys and values.
void feed(reprise::PromptCache& cache, int batch, int tokens) {
  const mx::array rows = mx::ones({batch, 2, tokens, 64});
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    cache.at<reprise::AttentionCache>(layer).update_and_fetch(rows, rows);
  }
  cache.eval();
}

}  // namespace

int main() {
  try {
    reprise::PromptCache first = make_cache();
    reprise::PromptCache second = make_cache();
    feed(first, 1, 100);
    feed(second, 1, 7);

    reprise::PromptCache both = reprise::merge_prompt_caches({&first, &second});
    feed(both, 2, 1);
    const reprise::PromptCache left = reprise::extract_prompt_cache(both, 1);
    std::cout << "the second row left the batch at token " << left[0].position().value_or(-1) << "\n";

    // The ring has dropped tokens, so it cannot trim; a snapshot takes both layers back.
    reprise::Snapshots snapshots;
    snapshots.take(first);
    feed(first, 1, 50);
    const bool can_trim = reprise::can_trim_prompt_cache(first, 50);
    const int reached = snapshots.rewind(first, 120).value_or(-1);
    std::cout << "a trim " << (can_trim ? "would do" : "cannot") << "; rewound to token " << reached << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
