// Caches whose values have no features: models that pick by keys alone what to attend to keep such.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise::cache_test {
namespace {

namespace mx = mlx::core;

using Make = std::function<std::unique_ptr<AttentionCache>()>;

// Both caches get the same keys; the second one's values have no features. Their keys have to stay the same.
void expect_same_keys(const Make& make, int batch) {
  const auto with_values = make(), keys_only = make();
  const RowShape full{.batch = batch}, thin{.batch = batch, .value_size = 0};
  int next = 0;
  for (const int count : {6, 1, 1, 1, 5, 1, 300}) {
    const Rows all = rows(range(next, next + count), full);
    const mx::array none = mx::zeros({batch, thin.heads, count, 0}, mx::float32);
    next += count;
    const auto shown = std::get<DenseKV>(with_values->update_and_fetch(all.keys, all.values));
    const auto thinly = std::get<DenseKV>(keys_only->update_and_fetch(all.keys, none));
    EXPECT_TRUE(identical(thinly.keys, shown.keys)) << keys_only->class_name() << " at " << next;
    mx::Shape shape = shown.values.shape();
    shape.back() = 0;
    EXPECT_EQ(thinly.values.shape(), shape);
    mx::eval(thinly.values);
    if (next == 6) {
      EXPECT_EQ(keys_only->trim(2), with_values->trim(2));
    }
  }
  EXPECT_EQ(keys_only->nbytes() * 2, with_values->nbytes());
}

TEST(KeysOnly, EveryClassOfDenseRowsKeepsThem) {
  expect_same_keys([] { return std::make_unique<KVCache>(); }, 1);
  expect_same_keys([] { return std::make_unique<ConcatenateKVCache>(); }, 1);
  expect_same_keys([] { return std::make_unique<ChunkedKVCache>(4); }, 1);
  expect_same_keys([] { return std::make_unique<RotatingKVCache>(8, 2); }, 1);
  expect_same_keys([] { return std::make_unique<BatchKVCache>(std::vector<int>{1, 0}); }, 2);
  expect_same_keys([] { return std::make_unique<BatchRotatingKVCache>(8, std::vector<int>{1, 0}); }, 2);
}

TEST(KeysOnly, RightPaddingIsRolledAway) {
  for (const bool ring : {false, true}) {
    std::unique_ptr<AttentionCache> cache;
    if (ring) {
      cache = std::make_unique<BatchRotatingKVCache>(8, std::vector<int>{0, 0});
    } else {
      cache = std::make_unique<BatchKVCache>(std::vector<int>{0, 0});
    }
    const Rows four = rows(range(0, 4), {.batch = 2, .value_size = 0});
    batched(*cache)->prepare({.lengths = {2, 4}, .right_padding = {2, 0}});
    cache->update_and_fetch(four.keys, four.values);
    batched(*cache)->finalize();
    EXPECT_EQ(cache->positions(), (std::vector<int>{2, 4}));
    const auto row = batched(*cache)->extract(0);
    EXPECT_EQ(row->length(), 2);
    const auto seen = std::get<DenseKV>(dynamic_cast<AttentionCache&>(*row).keys_and_values());
    EXPECT_EQ(seen.values.shape(), (mx::Shape{1, 2, 2, 0}));
    EXPECT_EQ(tokens_of(seen.keys), range(0, 2));
  }
}

TEST(KeysOnly, KeysThemselvesNeedFeatures) {
  KVCache cache;
  const mx::array none = mx::zeros({1, 2, 3, 0}, mx::float32), some = mx::ones({1, 2, 3, 32}, mx::float32);
  EXPECT_EQ(error_of([&] { cache.update_and_fetch(none, some); }).substr(0, 16), "invalid_argument");
  EXPECT_TRUE(cache.empty());
}

TEST(KeysOnly, QuantisedKeysGoOnWithoutValues) {
  KVCache cache;
  const mx::array none = mx::zeros({1, 2, 3, 0}, mx::float32), some = mx::ones({1, 2, 3, 32}, mx::float32);
  cache.update_and_fetch(some, none);
  const auto quantized = cache.to_quantized(32, 4);
  const auto seen = std::get<QuantizedKV>(dynamic_cast<AttentionCache&>(*quantized).update_and_fetch(some, none));
  EXPECT_EQ(seen.keys.packed.shape(), (mx::Shape{1, 2, 6, 4}));
  EXPECT_EQ(seen.values.packed.shape(), (mx::Shape{1, 2, 6, 0}));
  mx::eval(seen.keys.packed, seen.values.packed);
  const auto loaded = QuantizedKVCache::from_state(quantized->state());
  EXPECT_EQ(loaded->length(), 6);
}

}  // namespace
}  // namespace reprise::cache_test
