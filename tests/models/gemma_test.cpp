// What Gemma's configs and checkpoints leave open: older and newer keys, names and defaults mean the same model.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/storage/model_files.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;
using Json = nlohmann::json;

mx::array logits_of(const LanguageModel& model, PromptCache& cache) {
  std::vector<int> tokens;
  for (int i = 0; i < 21; ++i) tokens.push_back((i * 37 + 5) % 96);
  return model.forward(mx::array(tokens.data(), {1, 21}, mx::int32), cache);
}

mx::array logits_of(const ModelFiles& files) {
  const auto model = make_model(files);
  PromptCache cache = model->make_cache();
  return logits_of(*model, cache);
}

class Gemma : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const fs::path folder = test::kit_folder() / GetParam();
    if (!fs::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
    files = read_model_files(folder);
  }

  ModelFiles changed(const std::function<void(Json& text_config)>& change) const {
    ModelFiles other = files;
    Json json = Json::parse(files.config_json);
    change(json.contains("text_config") ? json["text_config"] : json);
    other.config_json = json.dump();
    return other;
  }

  void expect_same(const ModelFiles& other) const {
    EXPECT_TRUE(mx::array_equal(logits_of(other), logits_of(files)).item<bool>());
  }

  void expect_refused(const std::function<void(Json&)>& change, ErrorCode code) const {
    try {
      make_model(changed(change));
      ADD_FAILURE() << "made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  }

  ModelFiles files;
};

class Gemma3 : public Gemma {};
INSTANTIATE_TEST_SUITE_P(Kit, Gemma3, testing::Values("gemma3", "gemma3_text"));

TEST_P(Gemma3, RopeParametersOfEachLayerTypeAreTheOlderKeys) {
  expect_same(changed([](Json& json) {
    Json full = json["rope_scaling"].is_object() ? json["rope_scaling"] : Json{{"rope_type", "default"}};
    full["rope_theta"] = json["rope_theta"];
    const Json sliding = {{"rope_type", "default"}, {"rope_theta", json["rope_local_base_freq"]}};
    json["rope_parameters"] = {{"full_attention", full}, {"sliding_attention", sliding}};
    for (const char* key : {"rope_theta", "rope_local_base_freq", "rope_scaling"}) json.erase(key);
  }));
  const auto other = changed([](Json& json) {
    json["rope_parameters"] = {{"full_attention", {{"rope_theta", 500.0}}},
                               {"sliding_attention", {{"rope_theta", 20.0}}}};
  });
  EXPECT_FALSE(mx::allclose(logits_of(other), logits_of(files), 1e-3, 1e-3).item<bool>());
}

TEST_P(Gemma3, LayerTypesAreThePattern) {
  expect_same(changed([](Json& json) {
    const int pattern = json["sliding_window_pattern"];
    for (int i = 0; i < json["num_hidden_layers"].get<int>(); ++i) {
      json["layer_types"].push_back(i % pattern == pattern - 1 ? "full_attention" : "sliding_attention");
    }
    json.erase("sliding_window_pattern");
  }));
}

TEST_P(Gemma3, SizesThatNoModelCanHaveAreRefused) {
  for (const auto& [key, value] : {std::pair<const char*, Json>("query_pre_attn_scalar", 0),
                                   {"sliding_window_pattern", 0},
                                   {"sliding_window", -1},
                                   {"num_attention_heads", 0},
                                   {"num_key_value_heads", 3},
                                   {"rms_norm_eps", -1.0},
                                   {"rope_local_base_freq", "x"},
                                   {"head_dim", 32},
                                   {"num_hidden_layers", 9}}) {
    SCOPED_TRACE(key);
    expect_refused([&, k = key, v = value](Json& json) { json[k] = v; }, ErrorCode::corrupt_data);
  }
  expect_refused([](Json& json) { json["attn_logit_softcapping"] = 50.0; }, ErrorCode::unsupported);
  expect_refused([](Json& json) { json["hidden_activation"] = "relu"; }, ErrorCode::unsupported);
}

class Gemma3BesideVision : public Gemma {};
INSTANTIATE_TEST_SUITE_P(Kit, Gemma3BesideVision, testing::Values("gemma3"));

TEST_P(Gemma3BesideVision, NewerNamesAreTheOlderOnes) {
  ModelFiles other = files;
  other.weights.clear();
  for (const auto& [name, weight] : files.weights) {
    const std::string older = "language_model.model.";
    ASSERT_TRUE(name.starts_with(older)) << name;
    other.weights.emplace("model.language_model." + name.substr(older.size()), weight);
  }
  other.weights.emplace("model.vision_tower.x", mx::zeros({1}));
  other.weights.emplace("model.multi_modal_projector.x", mx::zeros({1}));
  expect_same(other);
}

class Gemma2 : public Gemma {};
INSTANTIATE_TEST_SUITE_P(Kit, Gemma2, testing::Values("gemma2"));

TEST_P(Gemma2, CapsReachQuantisedCaches) {
  const auto model = make_model(files);
  PromptCache dense = model->make_cache();
  PromptCache quantised = model->make_cache();
  for (std::size_t i = 0; i < quantised.size(); ++i) quantised.replace(i, std::make_unique<QuantizedKVCache>(32, 8));
  const auto want = logits_of(*model, dense);
  EXPECT_LT(test::relative_error(logits_of(*model, quantised), want), 2e-2);
  const auto uncapped = logits_of(changed([](Json& json) { json["attn_logit_softcapping"] = 1e6; }));
  EXPECT_GT(test::relative_error(uncapped, want), 5e-2);
}

TEST_P(Gemma2, CapsThatAreNotPositiveAreRefused) {
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}) {
    expect_refused([&](Json& json) { json[key] = 0.0; }, ErrorCode::corrupt_data);
  }
}

}  // namespace
}  // namespace reprise
