#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "mlx/mlx.h"
#include "reprise/storage/json_text.h"
#include "reprise/storage/model_files.h"
#include "reprise/storage/safetensors.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using json = nlohmann::json;
using testing::expect_error;
using testing::TemporaryFolder;
using testing::write_text;

// A folder with config.json, and one tensor in each file named.
class ModelFolder : public TemporaryFolder {
 public:
  explicit ModelFolder(const std::vector<std::string>& shards = {"model.safetensors"}) {
    write("config.json", R"({"model_type": "llama"})");
    int number = 0;
    for (const std::string& shard : shards) {
      const std::string name = "tensor" + std::to_string(number);
      write_safetensors(path() / shard, {{name, mx::array({static_cast<float>(number++)})}}, {});
    }
  }
  void write(const std::string& name, const std::string& text) const { write_text(path() / name, text); }
  void write_index(const json& weight_map) const {
    write("model.safetensors.index.json", json{{"metadata", json::object()}, {"weight_map", weight_map}}.dump());
  }
  ModelFiles read() const { return read_model_files(path()); }
};

TEST(ModelFolder, ReadsConfigAndWeights) {
  const ModelFolder folder;
  const ModelFiles files = folder.read();
  EXPECT_EQ(files.path, folder.path());
  EXPECT_EQ(files.config_json, R"({"model_type": "llama"})");
  ASSERT_EQ(files.weights.size(), 1u);
  EXPECT_EQ(files.weights.at("tensor0").data<float>()[0], 0.0f);
  EXPECT_EQ(files.fingerprint.size(), 64u);
}

TEST(ModelFolder, OnlyTheFullFingerprintTellsModelsThatDifferInOneElement) {
  const auto read = [](const ModelFolder& folder, int element, float value) {
    std::vector<float> values(5000, 0.5f);
    values[static_cast<std::size_t>(element)] = value;
    write_safetensors(folder / "model.safetensors", {{"tensor0", mx::array(values.data(), {50, 100})}}, {});
    return folder.read();
  };
  const ModelFolder one, two;
  const ModelFiles plain = read(one, 0, 0.5f);
  for (const int element : {100, 2500, 4900}) {
    const ModelFiles other = read(two, element, 0.25f);
    EXPECT_EQ(other.fingerprint, plain.fingerprint) << element;
    EXPECT_NE(full_fingerprint(other), full_fingerprint(plain)) << element;
  }
  EXPECT_EQ(full_fingerprint(read(two, 0, 0.5f)), full_fingerprint(plain)) << "in another folder";
  EXPECT_EQ(full_fingerprint(plain).size(), 64u);
  two.write("config.json", R"({"model_type": "llama", "rope_theta": 7})");
  EXPECT_NE(full_fingerprint(two.read()), full_fingerprint(plain)) << "another config";
}

TEST(ModelFolder, AFolderWithoutATokenizerLoads) {
  const TokenizerData data = ModelFolder().read().tokenizer;
  EXPECT_TRUE(data.tokenizer_json.empty());
  EXPECT_FALSE(data.gguf);
}

TEST(ModelFolder, ShardsAreReadWithAndWithoutAnIndex) {
  const std::vector<std::string> names{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  const ModelFolder folder(names);
  write_safetensors(folder / "adapters.safetensors", {{"other", mx::array(1)}}, {});
  EXPECT_EQ(folder.read().weights.size(), 2u);
  folder.write_index({{"tensor0", names[0]}, {"tensor1", names[1]}});
  const WeightMap weights = folder.read().weights;
  ASSERT_EQ(weights.size(), 2u);
  EXPECT_EQ(weights.at("tensor1").data<float>()[0], 1.0f);
}

TEST(ModelFolder, AMissingShardIsNamed) {
  const ModelFolder folder({"model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"});
  expect_error(ErrorCode::not_found, "model-00002-of-00003.safetensors", [&] { folder.read(); });
  folder.write_index(
      {{"tensor0", "model-00001-of-00003.safetensors"}, {"tensor1", "model-00002-of-00003.safetensors"}});
  expect_error(ErrorCode::not_found, "model-00002-of-00003.safetensors", [&] { folder.read(); });
}

TEST(ModelFolder, AnIndexThatNamesATensorItsShardLacksIsCorrupt) {
  const ModelFolder folder({"model-a.safetensors", "model-b.safetensors"});
  folder.write_index({{"tensor0", "model-a.safetensors"}, {"tensor9", "model-b.safetensors"}});
  expect_error(ErrorCode::corrupt_data, "\"tensor9\" is not in its shard model-b.safetensors", [&] { folder.read(); });
  folder.write_index({{"tensor0", "model-b.safetensors"}, {"tensor1", "model-a.safetensors"}});
  expect_error(ErrorCode::corrupt_data, "\"tensor0\" is not in its shard", [&] { folder.read(); });
}

TEST(ModelFolder, ATensorInTwoShardsIsCorrupt) {
  const ModelFolder folder({"model-a.safetensors"});
  std::filesystem::copy_file(folder / "model-a.safetensors", folder / "model-b.safetensors");
  expect_error(ErrorCode::corrupt_data, "\"tensor0\" is also in model-a.safetensors", [&] { folder.read(); });
}

TEST(ModelFolder, AnIndexCannotLeaveTheFolder) {
  const ModelFolder folder;
  for (const char* shard : {"../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""}) {
    folder.write_index({{"tensor0", shard}});
    expect_error(ErrorCode::corrupt_data, "file of this folder", [&] { folder.read(); });
  }
  folder.write_index({{"tensor0", 3}});
  expect_error(ErrorCode::corrupt_data, "no string", [&] { folder.read(); });
  folder.write("model.safetensors.index.json", "{}");
  expect_error(ErrorCode::corrupt_data, "no weight_map", [&] { folder.read(); });
  folder.write("model.safetensors.index.json", "[");
  expect_error(ErrorCode::corrupt_data, "index.json holds no JSON object", [&] { folder.read(); });
}

TEST(ModelFolder, WhatIsMissingIsNamed) {
  const ModelFolder folder(std::vector<std::string>{});
  expect_error(ErrorCode::unsupported, "no weights", [&] { folder.read(); });
  folder.write("pytorch_model.bin", "x");
  expect_error(ErrorCode::unsupported, "no weights", [&] { folder.read(); });
  std::filesystem::remove(folder / "config.json");
  expect_error(ErrorCode::not_found, "config.json is missing", [&] { folder.read(); });
}

TEST(ModelFolder, ADamagedFileIsNamed) {
  const ModelFolder folder;
  folder.write("config.json", "{");
  expect_error(ErrorCode::corrupt_data, "config.json", [&] { folder.read(); });
  folder.write("config.json", "[]");
  expect_error(ErrorCode::corrupt_data, "config.json", [&] { folder.read(); });
  folder.write("config.json", "{}");
  folder.write("model.safetensors", "damaged");
  expect_error(ErrorCode::corrupt_data, "model.safetensors", [&] { folder.read(); });
}

TEST(ModelFolder, BareInfinitiesBecomeNumbers) {
  const ModelFolder folder;
  folder.write("config.json",
               R"({"a": Infinity, "b": [-Infinity, NaN], "c": "Infinity \" NaN", "d": {"__float__": "-Infinity"}})");
  const json config = json::parse(folder.read().config_json);
  const double largest = std::numeric_limits<float>::max();
  EXPECT_EQ(config["a"], largest);
  EXPECT_EQ(config["b"][0], -largest);
  EXPECT_TRUE(config["b"][1].is_null());
  EXPECT_EQ(config["c"], "Infinity \" NaN");
  EXPECT_EQ(config["d"], -largest);
}

TEST(ModelFolder, DeepNestingIsRefusedWhereItWouldBeWalked) {
  const ModelFolder folder;
  folder.write("config.json", R"({"__float__": 1, "a": )" + std::string(500, '[') + std::string(500, ']') + "}");
  expect_error(ErrorCode::corrupt_data, "nested too deeply", [&] { folder.read(); });
}

// ---- tokenizer ----

class TokenizerFolder : public ModelFolder {
 public:
  TokenizerFolder() {
    write("tokenizer.json", R"({"version": "1.0", "added_tokens": [
        {"id": 1, "content": "<s>", "special": true}, {"id": 2, "content": "</s>"}, {"id": 9, "content": "<end>"}],
        "model": {"vocab": {"a": 0}}})");
  }
  TokenizerData tokenizer() const { return read().tokenizer; }
};

TEST(ModelFolder, SpecialTokensAreStringsOrObjects) {
  const TokenizerFolder folder;
  folder.write("tokenizer_config.json",
               R"({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "unk_token": null})");
  const TokenizerData data = folder.tokenizer();
  EXPECT_EQ(data.bos_token, "<s>");
  EXPECT_EQ(data.eos_token, "</s>");
  EXPECT_EQ(data.unk_token, "");
  EXPECT_EQ(data.bos_token_id, 1);
  EXPECT_EQ(data.eos_token_ids, (std::vector<TokenId>{2}));
  EXPECT_EQ(data.tokenizer_json, testing::read_text(folder / "tokenizer.json"));

  folder.write("tokenizer_config.json", R"({"bos_token": 3})");
  expect_error(ErrorCode::corrupt_data, "bos_token", [&] { folder.read(); });
}

TEST(ModelFolder, TheSpecialTokensMapIsTheFallback) {
  const TokenizerFolder folder;
  folder.write("tokenizer_config.json", R"({"eos_token": "</s>"})");
  folder.write("special_tokens_map.json", R"({"eos_token": "<end>", "pad_token": {"content": "<s>"}})");
  EXPECT_EQ(folder.tokenizer().eos_token, "</s>");
  EXPECT_EQ(folder.tokenizer().pad_token, "<s>");
}

TEST(ModelFolder, EndsAreTheTokenizersOwnThenThoseOfTheConfigs) {
  const TokenizerFolder folder;
  EXPECT_TRUE(folder.tokenizer().eos_token_ids.empty());
  folder.write("config.json", R"({"eos_token_id": 5, "bos_token_id": 4})");
  EXPECT_EQ(folder.tokenizer().eos_token_ids, (std::vector<TokenId>{5}));
  EXPECT_EQ(folder.tokenizer().bos_token_id, 4);
  folder.write("tokenizer_config.json", R"({"eos_token": "<end>", "bos_token": "<s>"})");
  EXPECT_EQ(folder.tokenizer().eos_token_ids, (std::vector<TokenId>{9, 5}));
  EXPECT_EQ(folder.tokenizer().bos_token_id, 1);
  folder.write("generation_config.json", R"({"eos_token_id": [7, 9, 8]})");
  EXPECT_EQ(folder.tokenizer().eos_token_ids, (std::vector<TokenId>{9, 7, 8}));
  folder.write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(folder.tokenizer().eos_token_ids, (std::vector<TokenId>{9, 5}));
  for (const char* wrong : {R"("</s>")", "1.5", "[[1]]", "4294967296"}) {
    folder.write("generation_config.json", std::string(R"({"eos_token_id": )") + wrong + "}");
    expect_error(ErrorCode::corrupt_data, "eos_token_id", [&] { folder.read(); });
  }
}

TEST(ModelFolder, AFileOfItsOwnWinsOverTheTemplateInTheConfig) {
  const TokenizerFolder folder;
  EXPECT_EQ(folder.tokenizer().chat_template, "");
  folder.write("chat_template.json", R"({"chat_template": "from json"})");
  EXPECT_EQ(folder.tokenizer().chat_template, "from json");
  folder.write("tokenizer_config.json", R"({"chat_template": "from config"})");
  EXPECT_EQ(folder.tokenizer().chat_template, "from config");
  folder.write("chat_template.jinja", "from jinja");
  EXPECT_EQ(folder.tokenizer().chat_template, "from jinja");
}

TEST(ModelFolder, OfNamedTemplatesTheDefaultCounts) {
  const TokenizerFolder folder;
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "tools"},
                                                             {"name": "default", "template": "plain"}]})");
  EXPECT_EQ(folder.tokenizer().chat_template, "plain");
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "only", "template": "one"}]})");
  EXPECT_EQ(folder.tokenizer().chat_template, "one");
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "default"}]})");
  expect_error(ErrorCode::corrupt_data, "chat_template", [&] { folder.read(); });
}

TEST(ModelFolder, ADamagedTokenizerConfigIsNamed) {
  const TokenizerFolder folder;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
    folder.write(name, "{damaged");
    expect_error(ErrorCode::corrupt_data, name, [&] { folder.read(); });
    std::filesystem::remove(folder / name);
  }
  EXPECT_NO_THROW(folder.read());
}

TEST(ModelFolder, TheFingerprintTellsModelsApart) {
  const TokenizerFolder folder;
  const std::string fingerprint = folder.read().fingerprint;
  EXPECT_EQ(folder.read().fingerprint, fingerprint);
  write_safetensors(folder / "model.safetensors", {{"tensor0", mx::array({2.0f})}}, {});
  const std::string other_value = folder.read().fingerprint;
  EXPECT_NE(other_value, fingerprint);
  write_safetensors(folder / "model.safetensors", {{"tensor1", mx::array({2.0f})}}, {});
  EXPECT_NE(folder.read().fingerprint, other_value);
  folder.write("chat_template.jinja", "x");
  EXPECT_NE(folder.read().fingerprint, other_value);
}

TEST(AddedTokens, AreReadUpToTheirEndOnly) {
  using internal::added_tokens_of;
  const std::map<std::string, int> want{{"<s>", 1}};
  EXPECT_EQ(added_tokens_of(R"({"added_tokens": [{"id": 1, "content": "<s>"}], "model": damaged)"), want);
  EXPECT_EQ(added_tokens_of(R"({"x": {"added_tokens": [{"id": 2, "content": "no"}]},
                               "added_tokens": [{"content": "<s>", "id": 1, "y": {"id": 5, "content": "z"}},
                                                {"id": 3}, {"content": "c"}, {"id": -1, "content": "n"}]})"),
            want);
  EXPECT_TRUE(added_tokens_of("damaged").empty());
  EXPECT_TRUE(added_tokens_of("").empty());
  EXPECT_TRUE(added_tokens_of("{}").empty());
}

// ---- what others wrote ----

TEST(ModelFolder, EveryFolderOfTheModelKitIsReadAsMlxReadsIt) {
  const auto shared = testing::shared_data();
  if (!shared) GTEST_SKIP() << "no model kit: set REPRISE_TEST_DATA";
  int num_folders = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(*shared / "models")) {
    if (entry.path().filename() != "config.json") continue;
    SCOPED_TRACE(entry.path());
    const std::filesystem::path folder = entry.path().parent_path();
    const ModelFiles files = read_model_files(folder);
    EXPECT_TRUE(json::parse(files.config_json).is_object());
    std::size_t num_tensors = 0;
    for (const auto& shard : std::filesystem::directory_iterator(folder)) {
      const std::string name = shard.path().filename();
      if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
      for (auto [tensor, want] : mx::load_safetensors(shard.path().string()).first) {
        want.eval();
        ++num_tensors;
        const mx::array& got = files.weights.at(tensor);
        ASSERT_EQ(got.dtype(), want.dtype()) << tensor;
        ASSERT_EQ(got.shape(), want.shape()) << tensor;
        ASSERT_EQ(std::memcmp(got.data<char>(), want.data<char>(), want.nbytes()), 0) << tensor;
      }
    }
    EXPECT_EQ(files.weights.size(), num_tensors);
    ++num_folders;
  }
  EXPECT_GT(num_folders, 40);
}

}  // namespace
}  // namespace reprise
