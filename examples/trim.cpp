// Take tokens back: after a trim everything is as if they had never been given. Needs no model.
#include <iostream>

#include "mlx/mlx.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"

namespace mx = mlx::core;

int main() {
  try {
    reprise::PromptCache cache = reprise::make_kv_prompt_cache(2);
    for (std::size_t layer = 0; layer < cache.size(); ++layer) {
      const auto rows = mx::random::normal({1, 4, 10, 64});  // [B, Hkv, L, D]
      cache.at<reprise::KVCache>(layer).update_and_fetch(rows, rows);
    }
    std::cout << "stored " << reprise::cache_length(cache) << " tokens in " << reprise::prompt_cache_nbytes(cache)
              << " bytes\n";

    reprise::PromptCache branch = cache.fork();
    const int taken = reprise::trim_prompt_cache(branch, 4);
    std::cout << "took back " << taken << " from the fork: it holds " << reprise::cache_length(branch)
              << ", the original still " << reprise::cache_length(cache) << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
