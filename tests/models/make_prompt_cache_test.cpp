// Which caches a model's layers get, and what max_kv_size makes of them.
#include <gtest/gtest.h>

#include <functional>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/models/language_model.h"

namespace reprise {
namespace {

// Nothing but a maker of caches.
class CacheMaker final : public LanguageModel {
 public:
  explicit CacheMaker(std::function<PromptCache()> make) : LanguageModel({}), make_(std::move(make)) {}
  mlx::core::array forward(const mlx::core::array& tokens, PromptCache&) const override { return tokens; }
  PromptCache make_cache() const override { return make_(); }

 private:
  std::function<PromptCache()> make_;
};

PromptCache one_of_each() {
  PromptCache cache;
  cache.push_back(std::make_unique<KVCache>());
  cache.push_back(std::make_unique<RotatingKVCache>(9));
  cache.push_back(std::make_unique<ArraysCache>(2));
  cache.push_back(std::make_unique<ChunkedKVCache>(8));
  cache.push_back(std::make_unique<CacheList>(std::make_unique<ArraysCache>(1), std::make_unique<KVCache>()));
  cache.push_back(std::make_unique<CacheList>(std::make_unique<RotatingKVCache>(5), std::make_unique<ArraysCache>(1)));
  cache.push_back(std::make_unique<ConcatenateKVCache>());
  return cache;
}

std::vector<std::string> described(const PromptCache& cache) {
  std::vector<std::string> layers;
  for (std::size_t i = 0; i < cache.size(); ++i) layers.push_back(describe_cache(cache[i]));
  return layers;
}

TEST(MakePromptCache, F1WithoutASizeEveryLayerIsTheModelsOwn) {
  const CacheMaker model(one_of_each);
  std::vector<LayerCacheChoice> choices;
  const auto cache = make_prompt_cache(model, {}, &choices);
  EXPECT_EQ(described(cache), described(one_of_each()));
  ASSERT_EQ(choices.size(), cache.size());
  for (const auto& choice : choices) EXPECT_FALSE(choice.bounded) << choice.cache;
}

TEST(MakePromptCache, F1ASizeReachesGrowingLayersAlsoInListsAndNoOthers) {
  const CacheMaker model(one_of_each);
  std::vector<LayerCacheChoice> choices;
  auto cache = make_prompt_cache(model, 16, &choices);
  EXPECT_EQ(described(cache),
            (std::vector<std::string>{"RotatingKVCache(16, keep 4)", "RotatingKVCache(9)", "ArraysCache",
                                      "ChunkedKVCache(8)", "CacheList(ArraysCache, RotatingKVCache(16, keep 4))",
                                      "CacheList(RotatingKVCache(5), ArraysCache)", "RotatingKVCache(16, keep 4)"}));
  EXPECT_EQ(cache.at<RotatingKVCache>(0).keep(), 4);
  const std::vector<bool> bounded = {true, false, false, false, true, false, true};
  ASSERT_EQ(choices.size(), bounded.size());
  for (std::size_t i = 0; i < bounded.size(); ++i) {
    EXPECT_EQ(choices[i].bounded, bounded[i]) << i;
    EXPECT_EQ(choices[i].cache, describe_cache(cache[i]));
  }
}

TEST(MakePromptCache, F1ASizeThatTheKeptTokensFillIsRefused) {
  const CacheMaker model(one_of_each);
  for (int size : {4, 1, 0, -3}) EXPECT_THROW(make_prompt_cache(model, size), Error) << size;
  EXPECT_NO_THROW(make_prompt_cache(model, 5));
}

TEST(DescribeCache, SaysWhatNarrowsACache) {
  EXPECT_EQ(describe_cache(KVCache()), "KVCache");
  EXPECT_EQ(describe_cache(QuantizedKVCache(32, 4)), "QuantizedKVCache(4 bits, groups of 32)");
  EXPECT_EQ(describe_cache(QuantizedRotatingKVCache(16, 4, 32, 8)),
            "QuantizedRotatingKVCache(16, keep 4; 8 bits, groups of 32)");
}

}  // namespace
}  // namespace reprise
