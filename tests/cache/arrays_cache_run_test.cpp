// Recurrent state over long runs and over padded prompts.
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_masks.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

TEST(ArraysCache, Z7AStoredSliceHoldsItsOwnBytesOnly) {
  ArraysCache cache(1);
  const std::size_t before = active_bytes();
  {
    mx::array chunk = mx::ones({1, 4096, 64});
    chunk.eval();
    cache.set(0, mx::slice(chunk, {0, 4093, 0}, {1, 4096, 64}));
    cache.get(0)->eval();
  }
  EXPECT_EQ(cache.nbytes(), 3u * 64u * 4u);
  EXPECT_LE(active_bytes(), before + 32768);

  auto batch = std::make_unique<ArraysCache>(1);
  batch->set(0, mx::ones({16, 64, 64}));
  batch->get(0)->eval();
  const auto row = batch->extract(3);
  dynamic_cast<ArraysCache&>(*row).get(0)->eval();
  batch.reset();
  EXPECT_LE(active_bytes(), before + row->nbytes() + 65536);
}

// A model that evaluates every step, and one that reads neither slots nor masks: each unevaluated set would keep 4 KB.
TEST(ArraysCache, Z6FiveThousandStepsKeepMemoryFlat) {
  for (const bool reads : {true, false}) {
    ArraysCache cache(2, {3, 0});
    cache.prepare({.lengths = {9000, 8000}});
    cache.set(0, mx::zeros({2, 512}));
    cache.set(1, mx::zeros({2, 512}));
    mx::eval(*cache.get(0), *cache.get(1));
    const std::size_t limit = active_bytes() + 4'000'000;
    for (int i = 0; i < 5000; ++i) {
      mx::array input = mx::full({2, 512}, 1.0f);
      input.eval();
      const Mask mask = cache.make_mask(1);
      cache.set(0, *cache.get(0) + input);
      cache.set(1, *cache.get(1) * 0.5f + input);
      cache.advance(1);
      if (reads) mx::eval(*cache.get(0), *cache.get(1), std::get<mx::array>(mask));
      ASSERT_LE(active_bytes(), limit) << "at step " << i;
    }
    EXPECT_EQ(mx::max(*cache.get(0)).item<float>(), 5000.0f);
    EXPECT_EQ(cache.lengths(), (std::vector<int>{4000, 3000}));
  }
}

// A layer that forgets by half and adds what comes; filler must not touch its state. Numbers are exact in float32.
void recur(ArraysCache& cache, const mx::array& x, bool advances = true) {
  const int N = x.shape(1);
  const Mask mask = create_ssm_mask(N, &cache);
  const auto* real = std::get_if<mx::array>(&mask);
  mx::array state = cache.get(0).value_or(mx::zeros({x.shape(0), 1}));
  for (int t = 0; t < N; ++t) {
    const mx::Shape start{0, t}, stop{x.shape(0), t + 1};
    const mx::array next = state * 0.5f + mx::slice(x, start, stop);
    state = real ? mx::where(mx::slice(*real, start, stop), next, state) : next;
  }
  cache.set(0, state);
  if (advances) cache.advance(N);
}

mx::array tokens_array(const std::vector<std::vector<float>>& rows, std::size_t begin, std::size_t end) {
  std::vector<float> values;
  for (const auto& row : rows)
    values.insert(values.end(), row.begin() + static_cast<std::ptrdiff_t>(begin),
                  row.begin() + static_cast<std::ptrdiff_t>(end));
  return mx::array(values.begin(), {static_cast<int>(rows.size()), static_cast<int>(end - begin)});
}

struct Prefill {
  bool left = false;
  bool advances = true;
  std::vector<std::size_t> chunks = {3, 2, 2};
};

// States of all rows after a padded prefill and two decode steps.
std::vector<float> batched_states(const std::vector<std::vector<float>>& prompts, const Prefill& prefill) {
  constexpr std::size_t kWidth = 7;
  constexpr float kFiller = 1000.0f;
  std::vector<std::vector<float>> padded;
  std::vector<int> padding, lengths;
  for (std::vector<float> row : prompts) {
    lengths.push_back(static_cast<int>(row.size()));
    padding.push_back(static_cast<int>(kWidth - row.size()));
    row.insert(prefill.left ? row.begin() : row.end(), kWidth - row.size(), kFiller);
    padded.push_back(std::move(row));
  }
  ArraysCache cache(1, prefill.left ? padding : std::vector<int>{});
  if (!prefill.left) cache.prepare({.lengths = lengths, .right_padding = padding});
  std::size_t at = 0;
  for (const std::size_t chunk : prefill.chunks) {
    recur(cache, tokens_array(padded, at, at + chunk), prefill.advances);
    at += chunk;
  }
  cache.finalize();
  for (int i = 0; i < 2; ++i) recur(cache, mx::full({static_cast<int>(prompts.size()), 1}, 3.0f));
  mx::array states = *cache.get(0);
  states.eval();
  return std::vector<float>(states.data<float>(), states.data<float>() + states.size());
}

TEST(ArraysCache, A1A2A3ChunkedPrefillOfUnequalRowsEqualsEachRowAlone) {
  const std::vector<std::vector<float>> prompts = {{1, 2, 3, 4, 5}, {6, 7}, {8, 9, 10, 11, 12, 13, 14}, {15}};
  std::vector<float> alone;
  for (const auto& prompt : prompts) {
    ArraysCache cache(1);
    recur(cache, tokens_array({prompt}, 0, prompt.size()));
    for (int i = 0; i < 2; ++i) recur(cache, mx::full({1, 1}, 3.0f));
    alone.push_back(cache.get(0)->item<float>());
  }
  for (const bool left : {false, true}) {
    for (const std::vector<std::size_t>& chunks : {std::vector<std::size_t>{7}, std::vector<std::size_t>{3, 2, 2},
                                                   std::vector<std::size_t>{1, 1, 1, 1, 1, 1, 1}})
      EXPECT_EQ(batched_states(prompts, {.left = left, .chunks = chunks}), alone);
    // What the test can see: a model that forgets to advance.
    EXPECT_NE(batched_states(prompts, {.left = left, .advances = false}), alone);
  }
}

}  // namespace
}  // namespace reprise
