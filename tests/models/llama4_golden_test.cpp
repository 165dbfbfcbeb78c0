// Llama 4's layers with other caches than their own, and what its configs may say.
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;
using Json = nlohmann::json;

class Llama4Golden : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(test::kit_folder() / "llama4")) GTEST_SKIP() << "no kit at " << test::kit_folder();
  }

  static ModelFiles files() { return read_model_files(test::kit_folder() / "llama4"); }

  static ModelFiles with(const std::string& key, const Json& value) {
    ModelFiles changed = files();
    Json config = Json::parse(changed.config_json);
    config["text_config"][key] = value;
    changed.config_json = config.dump();
    return changed;
  }

  static std::unique_ptr<LanguageModel> model(const ModelFiles& from) {
    return make_model(from, {.kv_dtype = mx::float32});
  }

  static std::vector<int> some_ids(int count) {
    std::vector<int> ids;
    for (int i = 0; i < count; ++i) ids.push_back((i * i * 7 + i * 13 + 5) % 96);
    return ids;
  }

  static mx::array run(const LanguageModel& model, PromptCache& cache, const std::vector<int>& pieces) {
    const std::vector<int> ids = some_ids(40);
    std::vector<mx::array> parts;
    auto at = ids.begin();
    for (const int n : pieces) {
      parts.push_back(mx::squeeze(test::feed(model, {std::vector<int>(at, at + n)}, cache), 0));
      at += n;
    }
    return mx::concatenate(parts, 0);
  }
};

TEST_F(Llama4Golden, CachesThatKeepAllRowsGiveWhatItsOwnGive) {
  const auto llama4 = model(files());
  PromptCache own = llama4->make_cache();
  EXPECT_EQ(describe_cache(own[0]), "ChunkedKVCache(8)");
  EXPECT_EQ(describe_cache(own[3]), "KVCache");
  const mx::array expected = run(*llama4, own, {40});
  for (const auto& pieces : {std::vector<int>{40}, {9, 1, 7, 23}, std::vector<int>(40, 1)}) {
    PromptCache growing, concatenating;
    for (int layer = 0; layer < 5; ++layer) {
      growing.push_back(std::make_unique<KVCache>());
      concatenating.push_back(std::make_unique<ConcatenateKVCache>());
    }
    EXPECT_LT(test::relative_error(run(*llama4, growing, pieces), expected), 1e-4);
    EXPECT_LT(test::relative_error(run(*llama4, concatenating, pieces), expected), 1e-4);
  }
}

TEST_F(Llama4Golden, AForkAndATrimmedCacheGoOnAsAColdOne) {
  const auto llama4 = model(files());
  const std::vector<int> ids = some_ids(40);
  PromptCache cold = llama4->make_cache();
  const mx::array expected = run(*llama4, cold, {40});
  PromptCache warm = llama4->make_cache();
  test::feed(*llama4, {std::vector<int>(ids.begin(), ids.begin() + 27)}, warm);
  test::feed(*llama4, {{7, 7}}, warm);
  // What chunked layers still hold whole is as far as it goes back.
  ASSERT_EQ(trim_prompt_cache(warm, 2), 2);
  PromptCache fork = warm.fork();
  test::feed(*llama4, {{1, 2, 3}}, fork);
  const mx::array rest = mx::squeeze(test::feed(*llama4, {std::vector<int>(ids.begin() + 27, ids.end())}, warm), 0);
  EXPECT_LT(test::relative_error(rest, mx::slice(expected, {27, 0}, expected.shape())), 1e-4);
}

TEST_F(Llama4Golden, CachesThatDropWhatAChunkNeedsAreRefused) {
  const auto llama4 = model(files());
  PromptCache rings, small;
  for (int layer = 0; layer < 5; ++layer) {
    rings.push_back(std::make_unique<RotatingKVCache>(16));
    small.push_back(std::make_unique<ChunkedKVCache>(4));
  }
  EXPECT_THROW(test::feed(*llama4, {{1, 2}}, rings), Error);
  EXPECT_THROW(test::feed(*llama4, {{1, 2}}, small), Error);
  EXPECT_EQ(cache_length(rings), 0);
}

TEST_F(Llama4Golden, NamedLayersAreAsTheDefaultNamesThem) {
  PromptCache cache = model(files())->make_cache();
  const mx::array expected = run(*model(files()), cache, {40});
  const auto same = [&](const ModelFiles& changed) {
    const auto llama4 = model(changed);
    PromptCache own = llama4->make_cache();
    return test::relative_error(run(*llama4, own, {40}), expected);
  };
  EXPECT_EQ(same(with("no_rope_layers", {1, 1, 1, 0, 1})), 0.0);
  EXPECT_EQ(same(with("no_rope_layers", Json::array())), 0.0);
  EXPECT_EQ(same(with("no_rope_layer_interval", 4)), 0.0);
  EXPECT_EQ(same(with("attn_temperature_tuning", true)), 0.0);
  const std::string chunked = "chunked_attention", full = "full_attention";
  EXPECT_EQ(same(with("layer_types", {chunked, chunked, chunked, full, chunked})), 0.0);
  EXPECT_GT(same(with("no_rope_layers", {1, 1, 0, 0, 1})), 1e-4);
  EXPECT_GT(same(with("attn_temperature_tuning", false)), 1e-4);
  EXPECT_GT(same(with("attention_chunk_size", 512)), 1e-4);
}

TEST_F(Llama4Golden, WhatDoesNotFitIsNamed) {
  const auto refused = [&](const std::string& key, const Json& value, ErrorCode code) {
    try {
      make_model(with(key, value));
      ADD_FAILURE() << "accepted " << key << " " << value;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(key), std::string::npos) << error.what();
    }
  };
  refused("no_rope_layers", {1, 0}, ErrorCode::corrupt_data);
  refused("no_rope_layer_interval", 0, ErrorCode::corrupt_data);
  refused("attention_chunk_size", 0, ErrorCode::corrupt_data);
  refused("layer_types", {"full_attention"}, ErrorCode::corrupt_data);
  refused("floor_scale", 0, ErrorCode::corrupt_data);
  refused("num_experts_per_tok", 4, ErrorCode::corrupt_data);
  refused("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}, ErrorCode::unsupported);
}

}  // namespace
}  // namespace reprise
