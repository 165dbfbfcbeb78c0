// [F2, F3, P1, P5, P7], trap 10: a cache of every class, in every state, comes back from a file and goes on as the
// original does.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_samples.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

PromptCache single_layer(std::unique_ptr<LayerCache> cache) {
  PromptCache layers;
  layers.push_back(std::move(cache));
  return layers;
}

std::unique_ptr<LayerCache> through_a_file(const LayerCache& cache, const SaveOptions& options = {}) {
  const TemporaryFolder folder;
  const std::string file = save_prompt_cache(folder.file("cache"), single_layer(cache.fork()), {}, options);
  LoadedPromptCache loaded = load_prompt_cache_file(file);
  std::filesystem::remove(file);
  return loaded.cache[0].fork();
}

std::set<std::string> names_of(const std::vector<CacheSample>& samples) {
  std::set<std::string> names;
  for (const CacheSample& sample : samples) names.insert(sample.make()->class_name());
  return names;
}

TEST(PromptCacheClasses, F2EveryClassIsAmongTheSamples) {
  const std::set<std::string> names = names_of(cache_samples());
  for (const char* name :
       {"ArraysCache", "BatchChunkedKVCache", "BatchKVCache", "BatchQuantizedKVCache", "BatchQuantizedRotatingKVCache",
        "BatchRotatingKVCache", "CacheList", "ChunkedKVCache", "ConcatenateKVCache", "KVCache", "QuantizedKVCache",
        "QuantizedRotatingKVCache", "RotatingKVCache"}) {
    EXPECT_TRUE(names.contains(name)) << name;
    EXPECT_TRUE(is_known_cache_class(name)) << name;
  }
}

TEST(PromptCacheClasses, F2F3EveryStateComesBackAndGoesOn) {
  for (const CacheSample& sample : cache_samples()) {
    SCOPED_TRACE(sample.name);
    const auto original = sample.make();
    const auto loaded = through_a_file(*original);
    ASSERT_EQ(loaded->class_name(), original->class_name());
    EXPECT_EQ(first_difference(go_on(*loaded, sample.shape), go_on(*original, sample.shape)), "");
  }
}

TEST(PromptCacheClasses, P7EveryStateComesBackFromTheLegacyLayoutOrIsRefusedByName) {
  SaveOptions options;
  options.layout = PromptCacheLayout::legacy;
  for (const CacheSample& sample : cache_samples()) {
    SCOPED_TRACE(sample.name);
    const auto original = sample.make();
    if (!sample.not_in_legacy.empty()) {
      const std::string error = error_of([&] { through_a_file(*original, options); });
      EXPECT_EQ(error.substr(0, 31), "unsupported: [save_prompt_cache") << error;
      EXPECT_NE(error.find(sample.not_in_legacy), std::string::npos) << error;
      continue;
    }
    std::unique_ptr<LayerCache> loaded;
    ASSERT_EQ(error_of([&] { loaded = through_a_file(*original, options); }), "nothing");
    EXPECT_EQ(first_difference(go_on(*loaded, sample.shape), go_on(*original, sample.shape)), "");
  }
}

// The pair itself knows more than the layout: also classes of our own.
TEST(PromptCacheClasses, P7ThePairOfEveryFilledStateRestoresIt) {
  for (const CacheSample& sample : cache_samples()) {
    const auto original = sample.make();
    const bool whole = sample.not_in_legacy.empty() || sample.not_in_legacy.starts_with("a class that");
    if (!whole || original->empty() || !original->extra_state().empty() || original->class_name() == "CacheList") {
      continue;
    }
    SCOPED_TRACE(sample.name);
    const auto restored = cache_from_legacy(original->class_name(), original->legacy_state(), original->legacy_meta());
    EXPECT_EQ(first_difference(restored->saved_state(), original->saved_state()), "");
  }
}

TEST(PromptCacheClasses, P1TheSameCacheGivesTheSameBytesAlsoAfterLoading) {
  const TemporaryFolder folder;
  for (const CacheSample& sample : cache_samples()) {
    SCOPED_TRACE(sample.name);
    const std::string bytes = read_bytes(save_prompt_cache(folder.file("a"), single_layer(sample.make())));
    EXPECT_EQ(read_bytes(save_prompt_cache(folder.file("b"), single_layer(sample.make()))), bytes);
    const PromptCache loaded = load_prompt_cache(folder.file("a.safetensors"));
    EXPECT_EQ(read_bytes(save_prompt_cache(folder.file("c"), loaded)), bytes);
  }
}

// Largest difference between two states' arrays, relative to 1; scalars must be equal.
float distance(const State& a, const State& b) {
  if (const auto* list = a.as_list()) {
    if (!b.as_list() || b.as_list()->size() != list->size()) return INFINITY;
    float most = 0;
    for (std::size_t i = 0; i < list->size(); ++i) most = std::max(most, distance((*list)[i], (*b.as_list())[i]));
    return most;
  }
  if (!a.as_array() || !b.as_array()) return identical(a, b) ? 0 : INFINITY;
  if (a.as_array()->shape() != b.as_array()->shape() || a.as_array()->dtype() != b.as_array()->dtype()) return INFINITY;
  if (a.as_array()->size() == 0) return 0;
  return mx::max(mx::abs(mx::astype(*a.as_array(), mx::float32) - mx::astype(*b.as_array(), mx::float32)))
      .item<float>();
}

float largest_step(const State& state) {
  float step = 0;
  for (const State& triple : {(*state.as_list())[0], (*state.as_list())[1]}) {
    if (!triple.is_null() && (*triple.as_list())[1].as_array()->size() > 0) {
      step =
          std::max(step, mx::max(mx::abs(mx::astype(*(*triple.as_list())[1].as_array(), mx::float32))).item<float>());
    }
  }
  return step;
}

const std::set<std::string> kOwn = {"BatchQuantizedKVCache", "BatchQuantizedRotatingKVCache",
                                    "QuantizedRotatingKVCache"};

TEST(PromptCacheClasses, P5APortableFileHasMlxLmsClassesAndGivesOursBack) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.portable = true;
  int converted = 0;
  for (const CacheSample& sample : cache_samples()) {
    SCOPED_TRACE(sample.name);
    const auto original = sample.make();
    if (original->class_name() == "BatchChunkedKVCache") {  // nothing of mlx-lm's comes near
      EXPECT_NE(error_of([&] {
                  save_prompt_cache(folder.file("p"), single_layer(original->fork()), {}, options);
                }).find("unsupported"),
                std::string::npos);
      continue;
    }
    const std::string file = save_prompt_cache(folder.file("p"), single_layer(original->fork()), {}, options);
    std::string texts;
    for (const auto& [key, value] : read_safetensors_header(file).metadata) {
      if (key != "2.0") texts += value + " ";
    }
    for (const std::string& own : kOwn) EXPECT_EQ(texts.find(own), std::string::npos) << texts;
    const PromptCache loaded = load_prompt_cache(file);
    ASSERT_EQ(loaded[0].class_name(), original->class_name());
    EXPECT_EQ(loaded[0].extra_state(), original->extra_state());
    if (sample.name == "CacheList of own classes") continue;
    if (!kOwn.contains(original->class_name())) {
      EXPECT_EQ(first_difference(loaded[0].saved_state(), original->saved_state()), "");
      continue;
    }
    ++converted;
    // Quantised again: a number moves by a step at most.
    EXPECT_LE(distance(loaded[0].to_dequantized()->saved_state(), original->to_dequantized()->saved_state()),
              1.01f * largest_step(original->state()));
    const State ours = loaded[0].state(), theirs = original->state();
    EXPECT_TRUE(identical(ours.as_list()->back(), theirs.as_list()->back()));  // bits
  }
  EXPECT_GT(converted, 30);
}

TEST(PromptCacheClasses, P7APortableLegacyFileHasMlxLmsClasses) {
  SaveOptions options;
  options.portable = true;
  options.layout = PromptCacheLayout::legacy;
  int converted = 0;
  for (const CacheSample& sample : cache_samples()) {
    const auto original = sample.make();
    if (!kOwn.contains(original->class_name()) || original->empty()) continue;
    const auto plain = original->to_dequantized();
    if (!plain->extra_state().empty()) continue;
    SCOPED_TRACE(sample.name);
    const auto loaded = through_a_file(*original, options);
    EXPECT_EQ(loaded->class_name(), plain->class_name());
    EXPECT_EQ(first_difference(loaded->saved_state(), plain->saved_state()), "");
    ++converted;
  }
  EXPECT_GT(converted, 20);
}

TEST(PromptCacheClasses, P5WhatWouldLeaveNoTraceIsRefusedAtTheTop) {
  const TemporaryFolder folder;
  for (const PromptCacheLayout layout : {PromptCacheLayout::current, PromptCacheLayout::legacy}) {
    SaveOptions options;
    options.layout = layout;
    PromptCache none = single_layer(std::make_unique<ArraysCache>(0));
    EXPECT_EQ(error_of([&] { save_prompt_cache(folder.file("a"), none, {}, options); }).substr(0, 40),
              "unsupported: [save_prompt_cache] layer 0");
    none = single_layer(std::make_unique<KVCache>());
    none.push_back(std::make_unique<CacheList>());
    EXPECT_NE(error_of([&] { save_prompt_cache(folder.file("a"), none, {}, options); }).find("unsupported"),
              std::string::npos);
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>());
}

TEST(PromptCacheClasses, P5AnEmptyConcatenateIsAnEmptyKVCacheToMlxLm) {
  const TemporaryFolder folder;
  const std::string file = save_prompt_cache(folder.file("c"), single_layer(std::make_unique<ConcatenateKVCache>()));
  const auto metadata = read_safetensors_header(file).metadata;
  EXPECT_EQ(metadata.at("1.0"), "KVCache");
  EXPECT_NE(metadata.at("2.0").find(R"("layers":{"0":{"class":"ConcatenateKVCache"}})"), std::string::npos)
      << metadata.at("2.0");
  EXPECT_EQ(load_prompt_cache(file)[0].class_name(), "ConcatenateKVCache");
}

TEST(PromptCacheClasses, P5ListsNestedTooDeeplyAreRefusedOnSaving) {
  const TemporaryFolder folder;
  for (const PromptCacheLayout layout : {PromptCacheLayout::current, PromptCacheLayout::legacy}) {
    SaveOptions options;
    options.layout = layout;
    std::unique_ptr<LayerCache> nested = std::make_unique<ArraysCache>(1);
    dynamic_cast<ArraysCache&>(*nested).set(0, mx::ones({1, 2}));
    std::string error;
    int depth = 0;
    for (; depth < 40 && error.empty(); ++depth) {
      PromptCache cache = single_layer(nested->fork());
      if (const std::string got = error_of([&] { save_prompt_cache(folder.file("n"), cache, {}, options); });
          got != "nothing") {
        error = got;
      } else {
        EXPECT_EQ(
            first_difference(load_prompt_cache(folder.file("n.safetensors"))[0].saved_state(), nested->saved_state()),
            "");
      }
      nested = std::make_unique<CacheList>(std::move(nested));
    }
    EXPECT_GT(depth, 10);
    EXPECT_NE(error.find("unsupported: [save_prompt_cache]"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace reprise
