// RandomOperations' prompts of several rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "reprise/cache/batched_cache.h"
#include "tests/cache/random_operations.h"

namespace reprise::cache_test {

void RandomOperations::padded_prompt(Subject& subject) {
  if (subject.num_rows() == 0) return;
  std::vector<std::vector<int>> prompts;
  int width = 2;
  for (int b = 0; b < subject.num_rows(); ++b) {
    prompts.push_back(new_tokens(pick(1, 20)));
    width = std::max(width, static_cast<int>(prompts.back().size()));
  }
  BatchPrompt prompt;
  for (const auto& tokens : prompts) {
    prompt.lengths.push_back(static_cast<int>(tokens.size()));
    prompt.right_padding.push_back(width - static_cast<int>(tokens.size()));
  }
  batched(*subject.cache)->prepare(prompt);
  for (int begin = 0; begin < width;) {
    int chunk = std::min(pick(2, 12), width - begin);
    // One token at a time is not for padded prompts.
    if (width - begin - chunk == 1) ++chunk;
    std::vector<std::vector<int>> tokens;
    for (const auto& row : prompts) {
      const int size = static_cast<int>(row.size());
      tokens.emplace_back(row.begin() + std::min(begin, size), row.begin() + std::min(begin + chunk, size));
    }
    ASSERT_NO_FATAL_FAILURE(append(subject, tokens, chunk, random_window(subject), true));
    batched(*subject.cache)->advance(chunk);
    begin += chunk;
    if (pick(0, 4) == 0) begin -= trim_prompt(subject, prompts, begin);
    if (pick(0, 4) == 0) reload(subject);
    if (pick(0, 4) == 0) save_and_load(subject);
    if (pick(0, 4) == 0) {
      std::vector<int> order(prompts.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
      batched(*subject.cache)->filter(order);
      prompts = chosen(prompts, order);
      for (auto& rows : subject.parts) rows = chosen(rows, order);
    }
  }
  batched(*subject.cache)->finalize();
}

int RandomOperations::trim_prompt(Subject& subject, const std::vector<std::vector<int>>& prompts, int fed) {
  const int n = pick(2, fed);  // one column could not come again alone
  const bool trimmable = subject.cache->is_trimmable();
  const int trimmed = subject.cache->trim(n);
  EXPECT_EQ(trimmed, trimmable ? n : 0);
  for (auto& rows : subject.parts) {
    for (std::size_t b = 0; b < rows.size(); ++b) {
      const int size = static_cast<int>(prompts[b].size());
      rows[b].forget(std::min(fed, size) - std::min(fed - trimmed, size));
    }
  }
  return trimmed;
}

}  // namespace reprise::cache_test
