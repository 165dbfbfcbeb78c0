// Adapters against mlx-lm's outputs (tests/data/adapters/make_adapters.py), and what does not fit.
#include "reprise/models/adapter.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/kernels/reference.h"
#include "reprise/models/language_model.h"
#include "reprise/storage/safetensors.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

const fs::path kAdapters = fs::path(REPRISE_SOURCE_DIR) / "tests/data/adapters";

mx::array logits(const LanguageModel& model, const mx::array& prompt) {
  auto cache = make_prompt_cache(model);
  return mx::squeeze(model.forward(mx::astype(prompt, mx::int32), cache), 0);
}

struct AdapterCase {
  const char* name;
  const char* model;
};

class AdapterGolden : public testing::TestWithParam<AdapterCase> {};

TEST_P(AdapterGolden, LogitsAreMlxLms) {
  const fs::path folder = test::kit_folder() / GetParam().model;
  if (!fs::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
  const kernels::reference::Scope scope;
  const auto files = read_model_files(folder);
  const auto adapter = std::make_shared<const Adapter>(read_adapter(kAdapters / GetParam().name));
  const auto expected = read_safetensors(kAdapters / GetParam().name / "expected.safetensors").tensors;
  const auto adapted = make_model(files, {.kv_dtype = mx::float32, .adapter = adapter});
  EXPECT_LE(test::relative_error(logits(*adapted, expected.at("prompt")), expected.at("logits")), 1e-4);
  // A test that cannot fail is none: without the adapter the numbers are others.
  const auto plain = make_model(files, {.kv_dtype = mx::float32});
  EXPECT_GE(test::relative_error(logits(*plain, expected.at("prompt")), expected.at("logits")), 1e-2);
}

INSTANTIATE_TEST_SUITE_P(Kit, AdapterGolden,
                         testing::Values(AdapterCase{"lora_llama_q8_g32", "llama_q8_g32"},
                                         AdapterCase{"lora_llama_bias_tied", "llama_bias_tied"},
                                         AdapterCase{"dora_llama_bias_tied", "llama_bias_tied"},
                                         AdapterCase{"dora_llama_q8_g32", "llama_q8_g32"},
                                         AdapterCase{"full_llama_bias_tied", "llama_bias_tied"},
                                         AdapterCase{"lora_mixtral", "mixtral"},
                                         AdapterCase{"lora_phi3_plain", "phi3_plain"}),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(Adapter, KernelsGiveWhatTheReferenceGives) {
  const fs::path folder = test::kit_folder() / "llama_q8_g32";
  if (!fs::exists(folder / "config.json")) GTEST_SKIP() << "no kit at " << folder;
  const auto adapter = std::make_shared<const Adapter>(read_adapter(kAdapters / "lora_llama_q8_g32"));
  const auto expected = read_safetensors(kAdapters / "lora_llama_q8_g32" / "expected.safetensors").tensors;
  const auto model = make_model(read_model_files(folder), {.kv_dtype = mx::float32, .adapter = adapter});
  EXPECT_LE(test::relative_error(logits(*model, expected.at("prompt")), expected.at("logits")), 1e-3);
}

class AdapterDamage : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder);
    fs::create_directories(folder);
    fs::copy(kAdapters / "lora_llama_bias_tied", folder, fs::copy_options::recursive);
  }
  void TearDown() override { fs::remove_all(folder); }
  void config(const std::string& text) { std::ofstream(folder / "adapter_config.json") << text; }
  void expect_refused(ErrorCode code, const std::string& part) {
    try {
      read_adapter(folder);
      ADD_FAILURE() << "accepted; expected a message with " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  void expect_unfit(const WeightMap& weights, const std::string& part) {
    const fs::path kit = test::kit_folder() / "llama_bias_tied";
    if (!fs::exists(kit / "config.json")) GTEST_SKIP() << "no kit at " << kit;
    Adapter adapter = read_adapter(folder);
    adapter.weights = weights;
    try {
      make_model(read_model_files(kit), {.adapter = std::make_shared<const Adapter>(std::move(adapter))});
      ADD_FAILURE() << "accepted; expected a message with " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_data) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  const fs::path folder = fs::path(testing::TempDir()) / "adapter_test";
};

TEST_F(AdapterDamage, FilesAreNamed) {
  config("{");
  expect_refused(ErrorCode::corrupt_data, "JSON");
  config(R"({"fine_tune_type": "ia3"})");
  expect_refused(ErrorCode::unsupported, "ia3");
  config(R"({"lora_parameters": {"rank": 4, "alpha": 16}})");
  expect_refused(ErrorCode::corrupt_data, "alpha");
  config(R"({"lora_parameters": {"rank": 4, "scale": 1e999}})");
  expect_refused(ErrorCode::corrupt_data, "");
  fs::remove(folder / "adapters.safetensors");
  config(R"({"lora_parameters": {"scale": 2}})");
  expect_refused(ErrorCode::not_found, "adapters.safetensors");
  fs::remove(folder / "adapter_config.json");
  expect_refused(ErrorCode::not_found, "adapter_config.json");
  fs::remove_all(folder);
  expect_refused(ErrorCode::not_found, "adapter_test");
}

TEST_F(AdapterDamage, TensorsThatDoNotFitAreNamed) {
  const WeightMap good = read_adapter(folder).weights;
  const std::string a = "model.layers.1.mlp.gate_proj.lora_a";
  WeightMap weights = good;
  weights.erase("model.layers.1.mlp.gate_proj.lora_b");
  expect_unfit(weights, "lora_b");
  weights = good;
  weights.insert_or_assign(a, mx::zeros({3, 4}));
  expect_unfit(weights, a);
  weights = good;
  weights.insert_or_assign(a, mx::zeros(good.at(a).shape(), mx::int32));
  expect_unfit(weights, a);
  weights = good;
  weights.insert_or_assign(a, mx::zeros({4}));
  expect_unfit(weights, a);
  weights = good;
  weights.emplace("model.layers.9.mlp.gate_proj.lora_a", good.at(a));
  expect_unfit(weights, "layers.9");
}

}  // namespace
}  // namespace reprise
