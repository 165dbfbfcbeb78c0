// What batches cost: bytes are counted by MLX's allocator, addresses are those of the evaluated buffers.
#include <gtest/gtest.h>

#include "mlx/transforms.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "tests/cache/batch_rows.h"
#include "tests/cache/live_memory.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 64, .value_size = 64};

void eval(const LayerCache& cache) {
  std::vector<mx::array> arrays;
  cache.state().collect_arrays(arrays);
  mx::eval(arrays);
}

void expect_decoding_in_place(internal::BatchGrowingCache& cache) {
  cache.prepare({.right_padding = {2, 0}});
  append_batch(cache, {{1, 2, 3, kFiller, kFiller}, {4, 5, 6, 7, 8}}, kShape);
  cache.finalize();
  const Rows one = batch_rows({{7}, {9}}, kShape);
  mx::eval(one.keys, one.values);
  std::size_t capacity_bytes = 0, overhead_at_growth = 0;
  const void* buffer = nullptr;
  int growths = 0;
  for (int i = 0; i < 5000; ++i) {
    {
      const KeysValues seen = cache.update_and_fetch(one.keys, one.values);
      const Mask mask = cache.make_mask(1);
      const Offset offset = cache.offset();
    }
    eval(cache);
    const std::size_t overhead = active_bytes() - cache.nbytes();
    if (capacity_bytes != cache.nbytes()) {
      // The allocator rounds each buffer up to pages.
      ASSERT_LE(overhead, cache.nbytes() / 256 + 6 * 16384) << "at step " << i;
      overhead_at_growth = overhead;
      capacity_bytes = cache.nbytes();
      buffer = key_buffer(cache);
      ++growths;
    }
    ASSERT_LE(overhead, overhead_at_growth + 1024) << "at step " << i;
    ASSERT_EQ(key_buffer(cache), buffer) << "at step " << i;
  }
  EXPECT_LE(growths, 5000 / 256 + 2);
  EXPECT_EQ(cache.positions(), (std::vector<int>{5003, 5005}));
}

TEST(BatchKVCacheMemory, Z6FiveThousandDecodeStepsAreInPlaceAndFlat) {
  BatchKVCache dense({0, 0});
  expect_decoding_in_place(dense);
}

TEST(BatchKVCacheMemory, Z6X7QuantisedOnesToo) {
  const auto quantized = BatchKVCache({0, 0}).to_quantized(64, 4);
  expect_decoding_in_place(dynamic_cast<internal::BatchGrowingCache&>(*quantized));
}

TEST(BatchKVCacheMemory, Z6AModelThatReadsNothingKeepsMemoryFlat) {
  BatchKVCache cache({1, 0});
  append_batch(cache, {range(0, 10), range(10, 20)}, kShape);
  eval(cache);
  const std::size_t limit = active_bytes() + 2 * cache.nbytes() + 400'000;
  for (int i = 0; i < 5000; ++i) {
    const Rows one = batch_rows({{i % 200}, {3}}, kShape);
    mx::eval(one.keys, one.values);
    cache.trim(1);
    cache.update_and_fetch(one.keys, one.values);
    ASSERT_LE(active_bytes(), limit) << "at step " << i;
  }
  EXPECT_EQ(tokens_of(row_of(cache.keys_and_values(), 0).keys).back(), 4999 % 200);
}

TEST(BatchKVCacheMemory, Z7ExtractedAndFilteredRowsHoldNoMoreThanTheirBytes) {
  for (const bool filters : {false, true}) {
    const std::size_t before = active_bytes();
    std::unique_ptr<LayerCache> kept;
    {
      BatchKVCache batch({0, 2990, 0});
      append_batch(batch, TokenRows(3, range(0, 3000)), kShape);
      eval(batch);
      if (filters) {
        kept = batch.fork();
        dynamic_cast<BatchKVCache&>(*kept).filter({1});
      } else {
        kept = batch.extract(1);
      }
      eval(*kept);
    }
    EXPECT_EQ(dynamic_cast<AttentionCache&>(*kept).length(), 10);
    EXPECT_LE(active_bytes() - before, kept->nbytes() + 2 * 16384);
  }
}

TEST(BatchKVCacheMemory, Z7AMergeOfOneHoldsNoMoreThanItsBytes) {
  const std::size_t before = active_bytes();
  std::unique_ptr<LayerCache> merged;
  {
    KVCache single;
    append(single, range(0, 3000), kShape);
    eval(single);
    single.trim(2990);
    merged = merge_caches({&single});
    eval(*merged);
  }
  EXPECT_LE(active_bytes() - before, merged->nbytes() + 2 * 16384);
}

TEST(BatchKVCacheMemory, X2OnlyTheFirstWriteAfterAForkCopies) {
  BatchKVCache parent({0, 0});
  append_batch(parent, {range(0, 300), range(300, 600)}, kShape);
  const void* original = key_buffer(parent);
  const auto fork = parent.fork();
  auto& child = dynamic_cast<BatchKVCache&>(*fork);
  append_batch(child, {{1}, {2}}, kShape);
  const void* copied = key_buffer(child);
  EXPECT_NE(copied, original);
  for (int i = 0; i < 50; ++i) {
    append_batch(child, {{3}, {4}}, kShape);
    append_batch(parent, {{5}, {6}}, kShape);
    ASSERT_EQ(key_buffer(child), copied);
    ASSERT_EQ(key_buffer(parent), original);
  }
}

}  // namespace
}  // namespace reprise
