#include "reprise/cache/prompt_cache.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

using namespace cache_test;

// A layer that answers as told, for what no class built so far can be.
class StubCache final : public LayerCache {
 public:
  struct Options {
    bool trimmable = true;
    int max_trim = 0;
    int trims = 0;  // what trim answers beyond n
    bool throws = false;
    std::optional<int> position = {};
  };
  explicit StubCache(Options options) : options_(options) {}

  std::string class_name() const override { return "KVCache"; }
  std::optional<int> position() const override { return options_.position; }
  int length() const override { return 0; }
  int size() const override { return 0; }
  bool empty() const override { return true; }
  std::size_t nbytes() const override { return 0; }
  bool is_trimmable() const override { return options_.trimmable; }
  int max_trim() const override { return options_.max_trim; }
  int trim(int n) override {
    if (options_.throws) throw Error(ErrorCode::internal, "[StubCache::trim] planted");
    return n + options_.trims;
  }
  State state() const override { return KVCache().state(); }
  State saved_state() const override { return state(); }
  State legacy_state() const override { return State::List{}; }
  Meta legacy_meta() const override { return {}; }
  std::unique_ptr<LayerCache> fork() const override { return std::make_unique<StubCache>(*this); }

 private:
  Options options_;
};

PromptCache filled(const std::vector<int>& lengths) {
  PromptCache cache;
  for (const int length : lengths) {
    auto layer = std::make_unique<KVCache>();
    append(*layer, range(0, length));
    cache.push_back(std::move(layer));
  }
  return cache;
}

std::vector<int> lengths(const PromptCache& cache) {
  std::vector<int> result;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) result.push_back(cache[layer].length());
  return result;
}

TEST(PromptCache, MakeGivesAnEmptyCacheForEachLayer) {
  const PromptCache cache = make_kv_prompt_cache(3);
  ASSERT_EQ(cache.size(), 3u);
  EXPECT_EQ(cache[2].class_name(), "KVCache");
  EXPECT_TRUE(cache[2].empty());
  EXPECT_EQ(make_kv_prompt_cache(0).size(), 0u);
  EXPECT_EQ(error_of([] { make_kv_prompt_cache(-1); }).substr(0, 16), "invalid_argument");
}

TEST(PromptCache, AtRefusesALayerOrAClassThatIsNotThere) {
  PromptCache cache = filled({3});
  EXPECT_EQ(cache.at<KVCache>(0).length(), 3);
  EXPECT_EQ(cache.at<AttentionCache>(0).length(), 3);
  EXPECT_EQ(error_of([&] { cache.at<StubCache>(0); }),
            "invalid_argument: [PromptCache::at] layer 0 must be of the class that the model needs, but got KVCache");
  EXPECT_EQ(error_of([&] { cache.at<KVCache>(1); }),
            "invalid_argument: [PromptCache::at] the cache must have a layer 1, but got 1 layers");
}

TEST(PromptCache, F4EveryLayerMustBeTrimmable) {
  EXPECT_TRUE(can_trim_prompt_cache(PromptCache()));
  EXPECT_TRUE(can_trim_prompt_cache(PromptCache(), 5));
  PromptCache cache = filled({5, 3});
  EXPECT_TRUE(can_trim_prompt_cache(cache));
  EXPECT_TRUE(can_trim_prompt_cache(cache, 3));
  EXPECT_FALSE(can_trim_prompt_cache(cache, 4));
  EXPECT_EQ(error_of([&] { can_trim_prompt_cache(cache, -1); }).substr(0, 16), "invalid_argument");
  cache.push_back(std::make_unique<StubCache>(StubCache::Options{.trimmable = false}));
  EXPECT_FALSE(can_trim_prompt_cache(cache));
  EXPECT_FALSE(can_trim_prompt_cache(cache, 0));
}

TEST(PromptCache, F5AllLayersAreTrimmedByTheSmallestMaxTrim) {
  PromptCache cache = filled({5, 3, 9});
  EXPECT_EQ(trim_prompt_cache(cache, 2), 2);
  EXPECT_EQ(lengths(cache), (std::vector<int>{3, 1, 7}));
  EXPECT_EQ(trim_prompt_cache(cache, 0), 0);
  EXPECT_EQ(trim_prompt_cache(cache, 100), 1);
  EXPECT_EQ(lengths(cache), (std::vector<int>{2, 0, 6}));
  EXPECT_EQ(trim_prompt_cache(cache, 1), 0);
  EXPECT_EQ(tokens_of(cache.at<KVCache>(2).keys_and_values()), range(0, 6));
  PromptCache none;
  EXPECT_EQ(trim_prompt_cache(none, 3), 0);
}

TEST(PromptCache, F5NegativeTrimThrowsAndChangesNothing) {
  PromptCache cache = filled({5});
  EXPECT_EQ(error_of([&] { trim_prompt_cache(cache, -1); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(lengths(cache), std::vector<int>{5});
}

TEST(PromptCache, X4ALayerThatCannotTrimKeepsAllAsTheyAre) {
  PromptCache cache = filled({5, 5});
  cache.push_back(std::make_unique<StubCache>(StubCache::Options{.trimmable = false, .max_trim = 9}));
  EXPECT_EQ(trim_prompt_cache(cache, 2), 0);
  EXPECT_EQ(lengths(cache), (std::vector<int>{5, 5, 0}));
}

TEST(PromptCache, X4ALayerThatFailsHalfwayUndoesTheOthers) {
  for (const StubCache::Options options :
       {StubCache::Options{.max_trim = 9, .throws = true}, StubCache::Options{.max_trim = 9, .trims = -1}}) {
    PromptCache cache = filled({5, 5});
    cache.push_back(std::make_unique<StubCache>(options));
    EXPECT_EQ(error_of([&] { trim_prompt_cache(cache, 2); }).substr(0, 8), "internal");
    EXPECT_EQ(lengths(cache), (std::vector<int>{5, 5, 0}));
    EXPECT_EQ(tokens_of(cache.at<KVCache>(1).keys_and_values()), range(0, 5));
  }
}

TEST(PromptCache, F6LengthIsTheLongestLayers) {
  EXPECT_EQ(cache_length(PromptCache()), 0);
  EXPECT_EQ(cache_length(filled({3, 7, 5})), 7);
  EXPECT_EQ(cache_length(make_kv_prompt_cache(2)), 0);
}

TEST(PromptCache, BytesAreTheSumOfTheLayers) {
  EXPECT_EQ(prompt_cache_nbytes(PromptCache()), 0u);
  EXPECT_EQ(prompt_cache_nbytes(filled({3, 300})), (256u + 512u) * 2u * 8u * 4u);
}

TEST(PromptCache, X1ForksAreIndependentAndOutliveTheParent) {
  auto parent = std::make_unique<PromptCache>(filled({5, 5}));
  PromptCache child = parent->fork(), other = fork_prompt_cache(*parent);
  append(child, {100});
  append(*parent, {200});
  EXPECT_EQ(trim_prompt_cache(other, 3), 3);
  append(other, {300});
  parent.reset();
  append(child, {101});
  EXPECT_EQ(tokens_of(child.at<KVCache>(1).keys_and_values()), (std::vector<int>{0, 1, 2, 3, 4, 100, 101}));
  EXPECT_EQ(tokens_of(other.at<KVCache>(0).keys_and_values()), (std::vector<int>{0, 1, 300}));
}

TEST(PromptCache, ReplacePutsAnotherCacheInALayersPlace) {
  PromptCache cache = filled({5, 5});
  auto layer = std::make_unique<KVCache>();
  append(*layer, range(0, 2));
  cache.replace(1, std::move(layer));
  EXPECT_EQ(lengths(cache), (std::vector<int>{5, 2}));
  EXPECT_THROW(cache.replace(2, std::make_unique<KVCache>()), Error);
  EXPECT_THROW(cache.replace(0, nullptr), Error);
  EXPECT_THROW(cache.push_back(nullptr), Error);
  EXPECT_EQ(lengths(cache), (std::vector<int>{5, 2}));
}

TEST(PromptCache, X5LayersOutOfStepAreNamed) {
  check_prompt_cache(PromptCache());
  check_prompt_cache(PromptCache(), 7);
  check_prompt_cache(filled({4, 4}));
  check_prompt_cache(filled({4, 4}), 4);
  EXPECT_EQ(error_of([] {
              check_prompt_cache(filled({4, 4, 3}));
            }),
            "failed_precondition: [check_prompt_cache] layer 2 (KVCache) must be at position 4 as layer 0 (KVCache), "
            "but got 3");
  EXPECT_EQ(error_of([] {
              check_prompt_cache(filled({4, 3}), 3);
            }),
            "failed_precondition: [check_prompt_cache] layer 0 (KVCache) must be at position 3, but got 4");
}

TEST(PromptCache, X5ALayerWithoutAPositionPasses) {
  PromptCache cache = filled({4});
  cache.push_back(std::make_unique<StubCache>(StubCache::Options{}));
  check_prompt_cache(cache, 4);
  cache.push_back(std::make_unique<StubCache>(StubCache::Options{.position = 5}));
  EXPECT_EQ(error_of([&] { check_prompt_cache(cache); }).substr(0, 64),
            "failed_precondition: [check_prompt_cache] layer 2 (KVCache) must");
}

TEST(Registry, AnUnknownClassIsNamed) {
  EXPECT_TRUE(is_known_cache_class("KVCache"));
  EXPECT_FALSE(is_known_cache_class("kvcache"));
  EXPECT_EQ(error_of([] { cache_from_state("Nobody", State(State::List{})); }),
            "unsupported: [cache_from_state] the cache class must be one that this build knows, but got \"Nobody\"");
  EXPECT_EQ(error_of([] { cache_from_legacy("Nobody", State(State::List{}), {}); }).substr(0, 11), "unsupported");
}

TEST(State, CollectsItsArraysInOrder) {
  const State state(
      State::List{State(mlx::core::array(1.0f)), State(3), State(State::List{State(), State(mlx::core::array(2.0f))})});
  std::vector<mlx::core::array> arrays;
  state.collect_arrays(arrays);
  ASSERT_EQ(arrays.size(), 2u);
  EXPECT_EQ(arrays[1].item<float>(), 2.0f);
}

}  // namespace
}  // namespace reprise
