// What the caches cost: bytes are counted by MLX's allocator, addresses are those of the evaluated buffers.
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 64, .value_size = 64};

TEST(KVCacheMemory, Z6FiveThousandDecodeStepsKeepAddressesBetweenGrowthsAndMemoryFlat) {
  KVCache cache;
  append(cache, range(0, 10), kShape);
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
  EXPECT_LE(growths, 5000 / 256 + 2);
  EXPECT_EQ(cache.length(), 5010);
}

TEST(KVCacheMemory, Z6MetadataThatNobodyReadsCostsNothing) {
  KVCache cache;
  const Rows one = rows({7}, kShape);
  append(cache, range(0, 300), kShape);
  mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  const std::size_t before = active_bytes();
  for (int i = 0; i < 5000; ++i) {
    cache.trim(1);
    cache.make_mask(4, {.return_array = true});
    cache.update_and_fetch(one.keys, one.values);
    if (i % 16 == 0)
      mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  }
  EXPECT_LE(active_bytes(), before + 65536);
  EXPECT_EQ(cache.length(), 300);
}

// Each update that is not evaluated keeps its rows alive: 5,000 of them would be 5 MB.
TEST(KVCacheMemory, Z6AModelThatReadsOnlyTheKeysOrNothingKeepsMemoryFlat) {
  for (const bool reads_keys : {true, false}) {
    KVCache cache;
    append(cache, range(0, 10), kShape);
    key_buffer(cache);
    const std::size_t limit = active_bytes() + 2 * cache.nbytes() + 200'000;
    for (int i = 0; i < 5000; ++i) {
      Rows one = rows({i % 200}, kShape);
      mx::eval(one.keys, one.values);
      cache.trim(1);
      const auto seen = std::get<DenseKV>(cache.update_and_fetch(one.keys, one.values));
      if (reads_keys) {
        mx::array keys = seen.keys;
        keys.eval();
      }
      ASSERT_LE(active_bytes(), limit) << "at step " << i;
    }
    EXPECT_EQ(tokens_of(cache.keys_and_values()).back(), 4999 % 200);
  }
}

// A step is dispatched before the one before it is read, as generation does it. With two layers or more, a layer's last
// reader is done when its next row is written.
TEST(KVCacheMemory, X2PipelinedDecodingKeepsAddresses) {
  constexpr std::size_t kLayers = 4;
  PromptCache cache;
  for (std::size_t layer = 0; layer < kLayers; ++layer) cache.push_back(std::make_unique<KVCache>());
  append(cache, range(0, 600), kShape);
  cache.eval();
  std::vector<const void*> buffers;
  for (std::size_t layer = 0; layer < kLayers; ++layer) buffers.push_back(key_buffer(cache.at<KVCache>(layer)));

  mx::array x = mx::ones({1, 2, 1, 64});
  std::optional<mx::array> previous;
  for (int i = 0; i < 100; ++i) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      AttentionOptions options;
      options.scale = 0.125f;
      x = cache.at<KVCache>(layer).attend(x, x * 0.5f, x, options) * 0.5f + x;
      for (int op = 0; op < 8; ++op) x = x * 0.99f;
    }
    mx::async_eval({x});
    if (previous) previous->eval();
    previous = x;
  }
  x.eval();
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(cache[layer].length(), 700);
    EXPECT_EQ(key_buffer(cache.at<KVCache>(layer)), buffers[layer]) << "layer " << layer;
  }
}

TEST(KVCacheMemory, X2SeveralLazyUpdatesWithTheirViewsAliveShowTheRightTokens) {
  KVCache cache;
  append(cache, range(0, 250));
  std::vector<KeysValues> views;
  for (int i = 0; i < 12; ++i) {  // over the growth at 256
    views.push_back(append(cache, {250 + i}));
    if (i == 5) mx::eval(std::get<DenseKV>(views[3]).keys);
  }
  for (int i = 11; i >= 0; --i) EXPECT_EQ(tokens_of(views[static_cast<std::size_t>(i)]), range(0, 251 + i));
}

TEST(KVCacheMemory, X1AForkCostsNoBytesWhateverTheLength) {
  for (const int length : {16, 4000}) {
    PromptCache cache;
    for (int layer = 0; layer < 3; ++layer) cache.push_back(std::make_unique<KVCache>());
    append(cache, range(0, length), kShape);
    cache.eval();
    const std::size_t before = active_bytes();
    std::vector<PromptCache> forks;
    for (int i = 0; i < 50; ++i) forks.push_back(cache.fork());
    for (const PromptCache& fork : forks) fork.eval();
    EXPECT_EQ(active_bytes(), before) << "length " << length;
  }
}

TEST(KVCacheMemory, X2OnlyTheFirstWriteAfterAForkCopies) {
  KVCache parent;
  append(parent, range(0, 300), kShape);
  const void* original = key_buffer(parent);
  const auto fork = parent.fork();
  auto& child = static_cast<KVCache&>(*fork);
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

TEST(KVCacheMemory, Z7SavedStateHoldsNoMoreThanItsRows) {
  KVCache cache;
  append(cache, range(0, 3000), kShape);
  mx::eval(std::get<DenseKV>(cache.keys_and_values()).keys, std::get<DenseKV>(cache.keys_and_values()).values);
  cache.trim(2990);
  const std::size_t without = active_bytes();
  auto restored = KVCache::from_state(cache.saved_state());
  mx::eval(std::get<DenseKV>(restored->keys_and_values()).keys, std::get<DenseKV>(restored->keys_and_values()).values);
  const std::size_t freed = cache.nbytes();
  cache = KVCache();
  const std::size_t held = active_bytes() - (without - freed);
  EXPECT_LE(held, restored->nbytes() + 2 * 16384);
  EXPECT_EQ(restored->nbytes(), 10u * 2u * 128u * 4u);
}

}  // namespace
}  // namespace reprise
