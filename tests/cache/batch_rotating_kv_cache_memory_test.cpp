// What rotating batches cost, by MLX's allocator and the addresses of evaluated buffers; and their attention.
#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/live_memory.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr RowShape kShape{.batch = 2, .heads = 2, .key_size = 64, .value_size = 64};

void eval(const internal::BatchRingCache& cache) {
  const auto all = std::get<DenseKV>(cache.keys_and_values());
  mx::eval(all.keys, all.values);
}

TEST(BatchRotatingKVCacheMemory, Z6FiveThousandDecodeStepsWriteInPlaceAndKeepMemoryFlat) {
  for (const int keep : {0, 4}) {
    BatchRotatingKVCache cache(100, {3, 0}, keep);
    append(cache, range(0, 120), kShape);
    append(cache, {1}, kShape);
    eval(cache);
    const Rows one = rows({7}, kShape);
    mx::eval(one.keys, one.values);
    const void* buffer = key_buffer(cache);
    const std::size_t before = active_bytes();
    EXPECT_EQ(cache.nbytes(), 100u * 2 * 2 * 128 * 4);
    for (int i = 0; i < 5000; ++i) {
      {
        const auto all = std::get<DenseKV>(cache.update_and_fetch(one.keys, one.values));
        mx::eval(all.keys, all.values);
      }
      ASSERT_LE(active_bytes(), before + 4096) << "at step " << i;
      ASSERT_EQ(key_buffer(cache), buffer) << "at step " << i;
    }
    EXPECT_EQ(cache.positions(), (std::vector<int>{5118, 5121}));
  }
}

TEST(BatchRotatingKVCacheMemory, Z6AModelThatReadsOnlyTheKeysOrNothingKeepsMemoryFlat) {
  for (const bool reads_keys : {true, false}) {
    BatchRotatingKVCache cache(32, {3, 0}, 4);
    append(cache, range(0, 40), kShape);
    eval(cache);
    const std::size_t limit = active_bytes() + 4 * cache.nbytes() + 200'000;
    for (int i = 0; i < 5000; ++i) {
      cache.make_mask(1);
      cache.offset();
      mx::array keys = std::get<DenseKV>(append(cache, {i % 200}, kShape)).keys;
      if (reads_keys) keys.eval();
      ASSERT_LE(active_bytes(), limit) << "at step " << i;
    }
  }
}

TEST(BatchRotatingKVCacheMemory, Z7ARowTakenOutHoldsNoMoreThanItself) {
  for (const bool by_filter : {true, false}) {
    auto cache = std::make_unique<BatchRotatingKVCache>(2000, std::vector<int>{0, 1990}, 4);
    append(*cache, range(0, 2000), kShape);
    eval(*cache);
    const std::size_t without = active_bytes() - cache->nbytes();
    std::unique_ptr<LayerCache> row;
    if (by_filter) {
      cache->filter({1});
      row = cache->fork();
    } else {
      row = cache->extract(1);
    }
    std::vector<mx::array> arrays;
    row->state().collect_arrays(arrays);
    mx::eval(arrays);
    arrays.clear();
    cache.reset();
    EXPECT_LE(active_bytes(), without + row->nbytes() + 32768);
    if (!by_filter) {
      EXPECT_EQ(row->nbytes(), 10u * 2 * 128 * 4);
    }
  }
}

TEST(BatchRotatingKVCacheMemory, X1X2AForkCostsNoBytesAndOnlyTheFirstWriteCopies) {
  BatchRotatingKVCache cache(100, {3, 0}, 4);
  append(cache, range(0, 120), kShape);
  append(cache, {1}, kShape);
  eval(cache);
  const std::size_t before = active_bytes();
  const void* buffer = key_buffer(cache);
  auto fork = as_ring_batch(cache.fork());
  EXPECT_EQ(active_bytes(), before);
  append(*fork, {1}, kShape);
  eval(*fork);
  const void* copy = key_buffer(*fork);
  EXPECT_NE(copy, buffer);
  for (int i = 0; i < 5; ++i) {
    append(*fork, {2}, kShape);
    append(cache, {3}, kShape);
    ASSERT_EQ(key_buffer(*fork), copy);
    ASSERT_EQ(key_buffer(cache), buffer);
  }
}

// Rows of a batch and alone, through attention with positions: outputs agree.
class Attention {
 public:
  Attention(int max_size, int keep) : rope_(RopeOptions{.dims = kSize}) {
    std::vector<const LayerCache*> caches;
    for (const int length : {0, 2, max_size - 1, 2 * max_size + 3}) {
      solos_.push_back(std::make_unique<RotatingKVCache>(max_size, keep));
      for (int done = 0; done < length; done += 3) {
        attend(*solos_.back(), draw(1, std::min(3, length - done)));
      }
    }
    for (const auto& solo : solos_) caches.push_back(solo.get());
    batch_ = as_ring_batch(merge_caches(caches));
  }

  void step(int length) {
    const auto rows = static_cast<int>(solos_.size());
    const Inputs all = draw(rows, length);
    const mx::array together = attend(*batch_, all);
    for (int row = 0; row < rows; ++row) {
      const mx::array alone = attend(*solos_[static_cast<std::size_t>(row)], all.row(row));
      const mx::array same = mx::slice(together, {row, 0, 0, 0}, {row + 1, kHeads, length, kSize});
      ASSERT_TRUE(mx::allclose(alone, same, 1e-5, 1e-5).item<bool>()) << "row " << row;
    }
  }

 private:
  static constexpr int kHeads = 4, kKvHeads = 2, kSize = 8;

  struct Inputs {
    mx::array queries, keys, values;
    Inputs row(int row) const {
      const auto cut = [&](const mx::array& x) {
        return mx::slice(x, {row, 0, 0, 0}, {row + 1, x.shape(1), x.shape(2), x.shape(3)});
      };
      return {cut(queries), cut(keys), cut(values)};
    }
  };

  Inputs draw(int rows, int length) {
    const auto one = [&](int heads) {
      return mx::random::normal({rows, heads, length, kSize}, mx::float32, 0.0f, 1.0f, mx::random::key(seed_++));
    };
    return {one(kHeads), one(kKvHeads), one(kKvHeads)};
  }

  mx::array attend(AttentionCache& cache, const Inputs& inputs) {
    AttentionOptions options;
    options.rope = &rope_;
    options.scale = 0.35f;
    options.mask = cache.make_mask(inputs.queries.shape(2));
    mx::array out = cache.attend(inputs.queries, inputs.keys, inputs.values, options);
    out.eval();
    return out;
  }

  Rope rope_;
  std::uint64_t seed_ = 1;
  std::vector<std::unique_ptr<RotatingKVCache>> solos_;
  std::unique_ptr<internal::BatchRingCache> batch_;
};

TEST(BatchRotatingKVCacheAttention, W1W9RowsAttendAsAloneThroughTwoWraps) {
  for (const int keep : {0, 4}) {
    Attention attention(12, keep);
    for (const int length : {1, 5, 1, 1, 2, 14}) ASSERT_NO_FATAL_FAILURE(attention.step(length));
    for (int i = 0; i < 25; ++i) ASSERT_NO_FATAL_FAILURE(attention.step(1));
    for (const int length : {3, 1, 20, 1}) ASSERT_NO_FATAL_FAILURE(attention.step(length));
  }
}

}  // namespace
}  // namespace reprise
