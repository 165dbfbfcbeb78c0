#include "reprise/cache/cache_masks.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

// "none", "causal" or the rows of a bool array as text.
std::string text_of(const Mask& mask) {
  if (std::holds_alternative<NoMask>(mask)) return "none";
  if (std::holds_alternative<Causal>(mask)) return "causal";
  mx::array array = mx::contiguous(std::get<mx::array>(mask));
  EXPECT_EQ(array.dtype(), mx::bool_);
  array.eval();
  std::string text;
  const auto width = static_cast<std::size_t>(array.shape(-1));
  for (std::size_t i = 0; i < array.size(); ++i) {
    if (i > 0 && i % width == 0) text += ' ';
    text += array.data<bool>()[i] ? '1' : '0';
  }
  return text;
}

std::unique_ptr<LayerCache> filled(std::unique_ptr<AttentionCache> cache, int length) {
  append(*cache, range(0, length), {.key_size = 32, .value_size = 32});
  return cache;
}

TEST(CacheMasks, M2WithoutACacheNothingPrecedesTheTokens) {
  const LayerCache* none = nullptr;
  EXPECT_EQ(text_of(create_attention_mask(1, none)), "none");
  EXPECT_EQ(text_of(create_attention_mask(1, none, {.window = 1, .return_array = true})), "none");
  EXPECT_EQ(text_of(create_attention_mask(3, none)), "causal");
  EXPECT_EQ(text_of(create_attention_mask(3, none, {.window = 3})), "causal");
  EXPECT_EQ(text_of(create_attention_mask(3, none, {.window = 2})), "100 110 011");
  EXPECT_EQ(text_of(create_attention_mask(3, none, {.return_array = true})), "100 110 111");
  EXPECT_EQ(error_of([&] { create_attention_mask(0, none); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { create_attention_mask(2, none, {.window = 0}); }).substr(0, 16), "invalid_argument");
}

TEST(CacheMasks, M2ACacheMakesItsOwnMask) {
  const auto kv = filled(std::make_unique<KVCache>(), 2);
  const auto quantized = filled(std::make_unique<QuantizedKVCache>(32, 8), 2);
  for (const LayerCache* cache : {kv.get(), quantized.get()}) {
    EXPECT_EQ(text_of(create_attention_mask(1, cache)), "none");
    EXPECT_EQ(text_of(create_attention_mask(1, cache, {.window = 2})), "011");
    EXPECT_EQ(text_of(create_attention_mask(2, cache)), "causal");
    EXPECT_EQ(text_of(create_attention_mask(2, cache, {.return_array = true})), "1110 1111");
    EXPECT_EQ(text_of(create_attention_mask(2, cache, {.window = 2})), "0110 0011");
  }
  const auto ring = filled(std::make_unique<RotatingKVCache>(4), 6);
  EXPECT_EQ(text_of(create_attention_mask(2, ring.get())), "11110 01111");
}

TEST(CacheMasks, M2AListAnswersWithItsFirstChildThatStoresKeys) {
  const CacheList list(std::make_unique<ArraysCache>(2, std::vector<int>{1, 0}),
                       std::unique_ptr<LayerCache>(std::make_unique<CacheList>(std::make_unique<MambaCache>(),
                                                                               filled(std::make_unique<KVCache>(), 2))),
                       filled(std::make_unique<KVCache>(), 5));
  EXPECT_EQ(text_of(create_attention_mask(2, &list, {.return_array = true})), "1110 1111");
  EXPECT_EQ(text_of(create_ssm_mask(3, &list)), "011 111");
}

TEST(CacheMasks, M3RecurrentLayersGetTheArraysMask) {
  const LayerCache* none = nullptr;
  EXPECT_EQ(text_of(create_ssm_mask(3, none)), "none");
  ArraysCache cache(1);
  EXPECT_EQ(text_of(create_ssm_mask(3, &cache)), "none");
  cache.prepare({.lengths = {2, 3}});
  EXPECT_EQ(text_of(create_ssm_mask(3, &cache)), "110 111");
  EXPECT_EQ(error_of([&] { create_ssm_mask(0, &cache); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { create_ssm_mask(0, none); }).substr(0, 16), "invalid_argument");
}

TEST(CacheMasks, M2M3TheWrongKindOfCacheIsRefused) {
  const ArraysCache arrays(1);
  const KVCache kv;
  const CacheList no_keys(std::make_unique<ArraysCache>(1));
  const CacheList no_state(std::make_unique<KVCache>());
  EXPECT_EQ(error_of([&] { create_attention_mask(1, &arrays); }),
            "invalid_argument: [create_attention_mask] a cache that stores keys is needed, but got ArraysCache");
  EXPECT_EQ(error_of([&] { create_attention_mask(1, &no_keys); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { create_ssm_mask(1, &kv); }),
            "invalid_argument: [create_ssm_mask] a cache of recurrent state is needed, but got KVCache");
  EXPECT_EQ(error_of([&] { create_ssm_mask(1, &no_state); }).substr(0, 16), "invalid_argument");
}

}  // namespace
}  // namespace reprise
