// Bounded and quantised prompt caches: what is decided before the first token, and what generation then does.
#include "reprise/generate/kv_cache_options.h"

#include <gtest/gtest.h>

#include <string>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "tests/generate/fake_model.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

// A cache of L rows of this head size.
std::unique_ptr<KVCache> filled_layer(int L, int head_size) {
  auto layer = std::make_unique<KVCache>();
  const auto rows = mx::random::normal({1, 2, L, head_size}, mx::float32, mx::random::key(7));
  layer->update_and_fetch(rows, rows);
  return layer;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

TEST(MaybeQuantizeKvCache, F8TheCallersCacheHoldsTheNewClassWithTheSameOffset) {
  PromptCache cache;
  cache.push_back(filled_layer(5, 64));
  cache.push_back(filled_layer(5, 64));
  maybe_quantize_kv_cache(cache, 6, 64, 8);
  EXPECT_EQ(cache[0].class_name(), "KVCache") << "one token short of the start";
  maybe_quantize_kv_cache(cache, 5, 32, 4);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(cache[i].class_name(), "QuantizedKVCache");
    EXPECT_EQ(cache[i].position(), 5);
    EXPECT_EQ(cache.at<QuantizedKVCache>(i).bits(), 4);
    EXPECT_EQ(cache.at<QuantizedKVCache>(i).group_size(), 32);
  }
  const LayerCache* before = &cache[0];
  maybe_quantize_kv_cache(cache, 0, 32, 4);
  EXPECT_EQ(&cache[0], before) << "what is quantised stays as it is";
  EXPECT_THROW(maybe_quantize_kv_cache(cache, -1, 64, 8), Error);
}

TEST(MaybeQuantizeKvCache, F8ChildrenOfAListChangeInPlaceAndOthersStay) {
  PromptCache cache;
  cache.push_back(std::make_unique<CacheList>(std::make_unique<ArraysCache>(2), filled_layer(3, 64)));
  cache.push_back(std::make_unique<ArraysCache>(2));
  const LayerCache* list = &cache[0];
  maybe_quantize_kv_cache(cache, 0, 64, 8);
  EXPECT_EQ(&cache[0], list);
  EXPECT_EQ(cache.at<CacheList>(0)[0].class_name(), "ArraysCache");
  EXPECT_EQ(cache.at<CacheList>(0)[1].class_name(), "QuantizedKVCache");
  EXPECT_EQ(cache[1].class_name(), "ArraysCache");
}

TEST(MaybeQuantizeKvCache, F8OneLayerThatCannotLeavesAllAsTheyWere) {
  PromptCache cache;
  cache.push_back(filled_layer(3, 64));
  cache.push_back(filled_layer(3, 48));
  const std::string message = message_of([&] { maybe_quantize_kv_cache(cache, 0, 64, 8); });
  EXPECT_NE(message.find("layer 1 (KVCache)"), std::string::npos) << message;
  EXPECT_EQ(cache[0].class_name(), "KVCache");
  EXPECT_EQ(cache[1].class_name(), "KVCache");
}

TEST(KVCacheOptions, NumbersOutsideTheirRangesAreRefusedWithTheList) {
  const auto refused = [](const KVCacheOptions& options) {
    return message_of([&] { check_kv_cache_options(options); });
  };
  EXPECT_NE(refused({.kv_bits = 7}).find("2, 3, 4, 5, 6 or 8"), std::string::npos);
  EXPECT_NE(refused({.kv_bits = 8, .kv_group_size = 48}).find("32, 64 or 128"), std::string::npos);
  EXPECT_NE(refused({.max_kv_size = 4}).find("at least 5"), std::string::npos);
  EXPECT_NE(refused({.quantized_kv_start = -1}).find("-1"), std::string::npos);
  EXPECT_NO_THROW(check_kv_cache_options({.max_kv_size = 5, .kv_bits = 5, .kv_group_size = 128}));
}

TEST(KVCacheOptions, SummaryNamesLayersOfOneKindTogether) {
  EXPECT_EQ(summarize_layers({"a", "a", "b", "a", "b"}), "layers 0-1, 3: a\nlayers 2, 4: b");
  EXPECT_EQ(summarize_layers({"a"}), "layer 0: a");
  EXPECT_EQ(summarize_layers({}), "");
}

struct KVCacheGeneration : testing::Test {
  test::Fake fake = test::make_fake();
  RecordedCache cache;

  void SetUp() override {
    fake.model->head_size = 64;
    start();
  }
  void start(std::optional<int> max_kv_size = {}) { cache = {make_prompt_cache(*fake.loaded.model, max_kv_size), {}}; }
  GenerateResult run(const Tokens& prompt, const GenerateOptions& options) {
    return generate(fake.loaded, prompt, cache, options);
  }
};

TEST_F(KVCacheGeneration, F8AGroupSizeThatFitsNoHeadIsRefusedBeforeThePromptAndSaysWhatFits) {
  bool began = false;
  const GenerateOptions options{.kv_cache = {.kv_bits = 8, .kv_group_size = 128},
                                .on_progress = [&](int, int) { began = true; }};
  const std::string message = message_of([&] { run({1, 2, 3}, options); });
  EXPECT_NE(message.find("--kv-group-size 32 or 64"), std::string::npos) << message;
  EXPECT_NE(message.find("layer 0"), std::string::npos) << message;
  EXPECT_FALSE(began);
  EXPECT_TRUE(cache.tokens.empty());
  fake.model->head_size = 48;
  EXPECT_NE(message_of([&] { run({1}, options); }).find("leave --kv-bits out"), std::string::npos);
}

TEST_F(KVCacheGeneration, G4PlanSaysPerLayerWhatWillHappenAndWhen) {
  fake.model->make_layer = [](int layer) -> std::unique_ptr<LayerCache> {
    if (layer == 1) return std::make_unique<RotatingKVCache>(9);
    return std::make_unique<KVCache>();
  };
  start(128);
  EXPECT_EQ(summarize_layers(plan_kv_cache(*fake.model, cache.cache, {})),
            "layer 0: RotatingKVCache(128, keep 4)\nlayer 1: RotatingKVCache(9)");
  start();
  const auto plan = plan_kv_cache(*fake.model, cache.cache, {.kv_bits = 4, .quantized_kv_start = 10});
  EXPECT_EQ(plan[0], "KVCache, from token 10 on QuantizedKVCache(4 bits, groups of 64)");
  EXPECT_EQ(cache.cache[0].class_name(), "KVCache") << "nothing is done yet";
}

TEST_F(KVCacheGeneration, G4QuantisesOnceTheStartIsReachedInPrefillOrInTheMiddleOfAnAnswer) {
  const Tokens prompt = {3, 1, 4, 1, 5, 9, 2, 6};
  const auto dense = run(prompt, {.max_tokens = 8}).tokens;
  for (int at : {0, 3, 4, 7, 8, 9, 12, 100}) {
    SCOPED_TRACE(at);
    start();
    const KVCacheOptions kv{.kv_bits = 8, .kv_group_size = 64, .quantized_kv_start = at};
    // Which classes the steps see, by position.
    std::vector<std::pair<int, std::string>> seen;
    const auto look = [&](int, int) { seen.emplace_back(*cache.cache[0].position(), cache.cache[0].class_name()); };
    fake.model->before_layer = [&](int layer, int) {
      if (layer == 0) look(0, 0);
    };
    const auto result = run(prompt, {.max_tokens = 8, .prefill_step_size = 3, .kv_cache = kv, .on_progress = look});
    fake.model->before_layer = [](int, int) {};
    EXPECT_EQ(result.tokens, dense) << "rows of one number each are quantised without loss";
    EXPECT_EQ(test::stored_ids(cache), cache.tokens);
    const bool reached = static_cast<int>(cache.tokens.size()) >= at;
    EXPECT_EQ(cache.cache[0].class_name(), reached ? "QuantizedKVCache" : "KVCache");
    for (const auto& [position, name] : seen) {
      if (position == 0) continue;
      EXPECT_EQ(name, position >= at ? "QuantizedKVCache" : "KVCache") << position;
    }
  }
}

TEST_F(KVCacheGeneration, G3TwoCallsOverAQuantisedCacheEqualOne) {
  const KVCacheOptions kv{.kv_bits = 4, .quantized_kv_start = 2};
  run({1, 2, 3}, {.max_tokens = 0, .kv_cache = kv});
  const auto second = run({4, 5}, {.max_tokens = 4, .kv_cache = kv});
  const Tokens record = cache.tokens;
  start();
  EXPECT_EQ(run({1, 2, 3, 4, 5}, {.max_tokens = 4, .kv_cache = kv}).tokens, second.tokens);
  EXPECT_EQ(cache.tokens, record);
}

TEST_F(KVCacheGeneration, G1G2AnExceptionWhileAStepIsBuiltLosesNothingOfARingThatCannotTrim) {
  // Prompt of 14 tokens through a ring of 6: it has wrapped when the steps begin to fail.
  Tokens prompt;
  for (int i = 0; i < 14; ++i) prompt.push_back(i);
  for (int layer : {0, 1}) {
    for (int call = 4; call < 9; ++call) {
      SCOPED_TRACE(std::to_string(layer) + " " + std::to_string(call));
      start(6);
      int calls = 0;
      fake.model->before_layer = [&](int at, int) {
        if (at == layer && calls++ == call) throw Error(ErrorCode::resource_exhausted, "planted");
      };
      EXPECT_THROW(run(prompt, {.max_tokens = 6, .prefill_step_size = 4}), Error);
      fake.model->before_layer = [](int, int) {};
      EXPECT_GE(cache.tokens.size(), 13u);
      EXPECT_EQ(cache.cache[0].position(), static_cast<int>(cache.tokens.size()));
      const Tokens rows = test::stored_ids(cache);
      EXPECT_EQ(Tokens(rows.end() - 2, rows.end()), Tokens(cache.tokens.end() - 2, cache.tokens.end()));
      EXPECT_EQ(Tokens(rows.begin(), rows.begin() + 4), (Tokens{0, 1, 2, 3}));
    }
  }
}

TEST_F(KVCacheGeneration, G2CancelAtEveryPointKeepsRecordAndPositionEqualInARing) {
  Tokens prompt;
  for (int i = 0; i < 11; ++i) prompt.push_back(i);
  for (int point = 0; point < 12; ++point) {
    start(6);
    std::stop_source stop;
    int events = 0;
    const auto count = [&] {
      if (events++ == point) stop.request_stop();
    };
    run(prompt, {.max_tokens = 5,
                 .prefill_step_size = 2,
                 .kv_cache = {.max_kv_size = 6},
                 .cancel = stop.get_token(),
                 .on_progress = [&](int, int) { count(); },
                 .on_text = [&](std::string_view) { count(); }});
    EXPECT_EQ(cache.cache[0].position().value_or(0), static_cast<int>(cache.tokens.size()));
    EXPECT_EQ(cache.cache[1].position().value_or(0), static_cast<int>(cache.tokens.size()));
    const Tokens rows = test::stored_ids(cache);
    if (rows.size() >= 2) {
      EXPECT_EQ(Tokens(rows.end() - 2, rows.end()), Tokens(cache.tokens.end() - 2, cache.tokens.end()));
    }
  }
}

TEST_F(KVCacheGeneration, Z6ThousandsOfStepsThroughARingLeaveNothingBehind) {
  start(64);
  std::vector<std::size_t> active;
  run({1}, {.max_tokens = 2000, .ignore_eos = true, .kv_cache = {.max_kv_size = 64}, .on_text = [&](std::string_view) {
              active.push_back(mx::get_active_memory());
            }});
  ASSERT_GT(active.size(), 1900u);
  EXPECT_LE(*std::max_element(active.begin() + 200, active.end()), active[200] + (256u << 10));
}

}  // namespace
}  // namespace reprise
