// What the sliding window costs: bytes are counted by MLX's allocator, addresses are those of the evaluated buffers.
#include <gtest/gtest.h>

#include <optional>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 64, .value_size = 64};

TEST(RotatingKVCacheMemory, Z6FiveThousandDecodeStepsKeepAddressesBetweenGrowthsAndMemoryFlat) {
  for (const int prompt : {10, 900}) {
    RotatingKVCache cache(600, 4);
    append(cache, range(0, prompt), kShape);
    const Rows one = rows({7}, kShape);
    mx::eval(one.keys, one.values);

    std::optional<std::size_t> capacity_bytes;
    const void* buffer = nullptr;
    int growths = 0;
    std::size_t overhead_at_first = 0;
    for (int i = 0; i < 5000; ++i) {
      {
        const auto seen = std::get<DenseKV>(cache.update_and_fetch(one.keys, one.values));
        mx::eval(seen.keys, seen.values);
      }
      const std::size_t overhead = active_bytes() - cache.nbytes();
      if (i == 0) overhead_at_first = overhead;
      ASSERT_LE(overhead, overhead_at_first + 4096) << "at step " << i;
      if (capacity_bytes != cache.nbytes()) {
        capacity_bytes = cache.nbytes();
        buffer = key_buffer(cache);
        ++growths;
      }
      ASSERT_EQ(key_buffer(cache), buffer) << "at step " << i;
    }
    EXPECT_LE(growths, 4);
    EXPECT_EQ(cache.position(), prompt + 5000);
    EXPECT_EQ(cache.nbytes(), 600u * 2u * 128u * 4u);
  }
}

TEST(RotatingKVCacheMemory, Z6MasksThatNobodyReadsCostNothing) {
  RotatingKVCache cache(300, 4);
  append(cache, range(0, 400), kShape);
  const Rows one = rows({7}, kShape);
  append(cache, {7}, kShape);
  key_buffer(cache);
  const std::size_t before = active_bytes();
  for (int i = 0; i < 5000; ++i) {
    cache.make_mask(1, {.window = 100});
    cache.make_mask(4, {.return_array = true});
    cache.update_and_fetch(one.keys, one.values);
    if (i % 16 == 0)
      mx::eval(std::get<DenseKV>(cache.keys_and_values()).values, std::get<DenseKV>(cache.keys_and_values()).keys);
  }
  mx::eval(std::get<DenseKV>(cache.keys_and_values()).values, std::get<DenseKV>(cache.keys_and_values()).keys);
  EXPECT_LE(active_bytes(), before + 65536);
}

TEST(RotatingKVCacheMemory, Z6AModelThatReadsOnlyTheKeysOrNothingKeepsMemoryFlat) {
  for (const bool reads_keys : {true, false}) {
    RotatingKVCache cache(300, 4);
    append(cache, range(0, 400), kShape);
    append(cache, {7}, kShape);
    key_buffer(cache);
    const std::size_t limit = active_bytes() + 2 * cache.nbytes() + 200'000;
    for (int i = 0; i < 5000; ++i) {
      Rows one = rows({i % 200}, kShape);
      mx::eval(one.keys, one.values);
      const auto seen = std::get<DenseKV>(cache.update_and_fetch(one.keys, one.values));
      if (reads_keys) {
        mx::array keys = seen.keys;
        keys.eval();
      }
      ASSERT_LE(active_bytes(), limit) << "at step " << i;
    }
    EXPECT_EQ(tokens_of(cache.keys_and_values())[static_cast<std::size_t>(cache.idx() - 1)], 4999 % 200);
  }
}

// A step is dispatched before the one before it is read, as generation does it.
TEST(RotatingKVCacheMemory, X2PipelinedDecodingKeepsAddresses) {
  constexpr std::size_t kLayers = 4;
  PromptCache cache;
  for (std::size_t layer = 0; layer < kLayers; ++layer) cache.push_back(std::make_unique<RotatingKVCache>(300, 4));
  append(cache, range(0, 600), kShape);
  append(cache, {1}, kShape);
  cache.eval();
  std::vector<const void*> buffers;
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    buffers.push_back(key_buffer(cache.at<RotatingKVCache>(layer)));
  }

  mx::array x = mx::ones({1, 2, 1, 64});
  std::optional<mx::array> previous;
  for (int i = 0; i < 100; ++i) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      AttentionOptions options;
      options.scale = 0.125f;
      x = cache.at<RotatingKVCache>(layer).attend(x, x * 0.5f, x, options) * 0.5f + x;
      for (int op = 0; op < 8; ++op) x = x * 0.99f;
    }
    mx::async_eval({x});
    if (previous) previous->eval();
    previous = x;
  }
  x.eval();
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(cache[layer].position(), 701);
    EXPECT_EQ(key_buffer(cache.at<RotatingKVCache>(layer)), buffers[layer]) << "layer " << layer;
  }
}

TEST(RotatingKVCacheMemory, X2OnlyTheFirstWriteAfterAForkCopies) {
  RotatingKVCache parent(300, 4);
  append(parent, range(0, 400), kShape);
  append(parent, {1}, kShape);
  const void* original = key_buffer(parent);
  const auto fork = parent.fork();
  auto& child = static_cast<RotatingKVCache&>(*fork);
  append(child, {1}, kShape);
  const void* copied = key_buffer(child);
  EXPECT_NE(copied, original);
  for (int i = 0; i < 50; ++i) {
    append(child, {2}, kShape);
    append(parent, {3}, kShape);
    ASSERT_EQ(key_buffer(child), copied);
    ASSERT_EQ(key_buffer(parent), original);
  }
}

TEST(RotatingKVCacheMemory, Z7AnOversizeChunkIsNotHeldOnceATokenFollows) {
  const std::size_t before = active_bytes();
  RotatingKVCache cache(64, 4);
  append(cache, range(0, 4000), kShape);
  mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  append(cache, {1}, kShape);
  mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  EXPECT_EQ(cache.nbytes(), 64u * 2u * 128u * 4u);
  EXPECT_LE(active_bytes(), before + cache.nbytes() + 2 * 16384);
}

}  // namespace
}  // namespace reprise
