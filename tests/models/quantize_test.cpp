// What a model says it has taken from its files, and what quantising makes of it.
#include "reprise/models/quantize.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/models/language_model.h"
#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

std::map<std::string, mx::array> stored_of(const ModelFiles& files) {
  std::vector<StoredWeight> stored;
  make_model(files, {.stored = &stored});
  std::map<std::string, mx::array> by_name;
  for (const StoredWeight& weight : stored) {
    EXPECT_TRUE(by_name.emplace(weight.name, weight.value).second) << weight.name << " was taken twice";
  }
  return by_name;
}

// Of every folder of the kit, and of its original layout where there is one.
TEST(StoredWeights, MakeTheSameModelAgain) {
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(test::kit_folder())) {
    for (const fs::path& folder : {entry.path(), entry.path() / "hf"}) {
      if (!fs::exists(folder / "config.json")) continue;
      SCOPED_TRACE(folder.string());
      ++folders;
      ModelFiles files = read_model_files(folder);
      const auto first = stored_of(files);
      files.weights = {first.begin(), first.end()};
      const auto second = stored_of(files);
      ASSERT_EQ(first.size(), second.size());
      for (const auto& [name, weight] : first) {
        const auto again = second.find(name);
        ASSERT_NE(again, second.end()) << name;
        ASSERT_EQ(again->second.shape(), weight.shape()) << name;
        EXPECT_TRUE(mx::array_equal(again->second, weight).item<bool>()) << name;
      }
    }
  }
  EXPECT_GT(folders, 0) << "no kit at " << test::kit_folder();
}

// Tensors of mlx-lm's folders that are taken are handed out as they are in the file, in its layout.
TEST(StoredWeights, AreTheFilesOwn) {
  for (const auto& entry : fs::directory_iterator(test::kit_folder())) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().string());
    const ModelFiles files = read_model_files(entry.path());
    for (const auto& [name, weight] : stored_of(files)) {
      const auto original = files.weights.find(name);
      ASSERT_NE(original, files.weights.end()) << name;
      ASSERT_EQ(weight.shape(), original->second.shape()) << name;
      EXPECT_TRUE(mx::array_equal(weight, original->second).item<bool>()) << name;
    }
  }
}

// Maps that a file holds as one matrix (Phi 3's) are cut in every format.
TEST(QuantizeModel, EveryFormatOfEveryFolderIsReadAgain) {
  for (const auto& entry : fs::directory_iterator(test::kit_folder())) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    for (const auto& format : {std::optional<MicroscalingFormat>(), std::optional(MicroscalingFormat::mxfp4),
                               std::optional(MicroscalingFormat::nvfp4)}) {
      SCOPED_TRACE(entry.path().string() + (format ? std::string(" ") + name_of(*format) : ""));
      ModelFiles files = read_model_files(entry.path());
      try {
        const auto quantized = quantize_model(files, {.bits = 4, .group_size = 32, .format = format});
        files.config_json = quantized.config_json;
        files.weights = quantized.weights;
      } catch (const Error&) {
        continue;  // of quantised weights already, or of sizes that no group divides
      }
      EXPECT_NO_THROW(make_model(files));
    }
  }
}

TEST(QuantizeModel, WhatCannotBeDoneIsSaid) {
  const fs::path dense = test::kit_folder() / "llama_bias_tied";
  const fs::path quantised = test::kit_folder() / "llama_q8_g32";
  if (!fs::exists(dense / "config.json")) GTEST_SKIP() << "no kit at " << dense;
  const auto code_of = [](const fs::path& folder, const QuantizeOptions& options) {
    try {
      quantize_model(read_model_files(folder), options);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  EXPECT_EQ(code_of(dense, {.bits = 7}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of(dense, {.group_size = 16}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of(quantised, {}), ErrorCode::failed_precondition);
}

}  // namespace
}  // namespace reprise
