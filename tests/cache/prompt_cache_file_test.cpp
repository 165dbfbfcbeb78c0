#include "reprise/cache/prompt_cache_file.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using Metadata = std::map<std::string, std::string>;

PromptCache filled(int layers, int length, const RowShape& shape = {}) {
  PromptCache cache = make_kv_prompt_cache(layers);
  if (length > 0) append(cache, range(0, length), shape);
  return cache;
}

std::string saved(const TemporaryFolder& folder, const PromptCache& cache, const Metadata& metadata = {},
                  const SaveOptions& options = {}) {
  return save_prompt_cache(folder.file("cache"), cache, metadata, options);
}

void expect_same(const PromptCache& a, const PromptCache& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t layer = 0; layer < a.size(); ++layer) {
    EXPECT_EQ(a[layer].class_name(), b[layer].class_name());
    EXPECT_TRUE(identical(a[layer].saved_state(), b[layer].saved_state())) << "layer " << layer;
  }
}

SaveOptions legacy() {
  SaveOptions options;
  options.layout = PromptCacheLayout::legacy;
  return options;
}

TEST(PromptCacheFile, F2F3WhatIsLoadedIsWhatWasSavedAndGoesOn) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    for (const SaveOptions& options : {SaveOptions(), legacy()}) {
      const RowShape shape{.batch = 2, .heads = 3, .key_size = 6, .value_size = 2, .dtype = dtype};
      const TemporaryFolder folder;
      PromptCache cache = filled(2, 7, shape);
      std::string file = saved(folder, cache, {}, options);
      Metadata metadata = {{"left", "over"}};
      PromptCache loaded = load_prompt_cache(file, &metadata);
      EXPECT_EQ(metadata, Metadata());
      std::filesystem::remove(file);
      expect_same(loaded, cache);
      for (int i = 0; i < 3; ++i) {
        append(loaded, {7 + i}, shape);
        append(cache, {7 + i}, shape);
        EXPECT_TRUE(std::holds_alternative<Causal>(loaded.at<KVCache>(0).make_mask(2)));
      }
      expect_same(loaded, cache);
    }
  }
}

TEST(PromptCacheFile, F2TheSuffixIsAppendedOnce) {
  const TemporaryFolder folder;
  EXPECT_EQ(save_prompt_cache(folder.file("a"), filled(1, 2)), folder.file("a.safetensors"));
  EXPECT_EQ(save_prompt_cache(folder.file("b.safetensors"), filled(1, 2)), folder.file("b.safetensors"));
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a.safetensors", "b.safetensors"}));
}

TEST(PromptCacheFile, F3TheNameMustHaveTheSuffixAndTheFileBeThere) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { load_prompt_cache(folder.file("cache")); }).substr(0, 16), "invalid_argument");
  EXPECT_EQ(error_of([&] { load_prompt_cache(folder.file("no.safetensors")); }).substr(0, 9), "not_found");
}

TEST(PromptCacheFile, P1TheLayoutIsMlxLms) {
  const TemporaryFolder folder;
  const std::string file = saved(folder, filled(1, 3), {{"model", "test/model"}});
  const SafetensorsHeader header = read_safetensors_header(file);
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "0.0");
  EXPECT_EQ(header.tensors[0].dtype, "F32");
  EXPECT_EQ(header.tensors[1].name, "0.1");
  EXPECT_EQ(header.tensors[2].name, "0.2");
  EXPECT_EQ(header.tensors[2].dtype, "I32");
  EXPECT_EQ(header.tensors[2].shape, std::vector<std::int64_t>());
  Metadata metadata = header.metadata;
  EXPECT_EQ(metadata["2.0"].substr(0, 12), "{\"reprise\":1");
  metadata.erase("2.0");
  EXPECT_EQ(metadata, (Metadata{{"0.model", "test/model"}, {"1.0", "KVCache"}, {"2.1.0", "0.2"}, {"2.1.1", "scalar"}}));
  EXPECT_EQ(header.data_offset % 8, 0u);
}

TEST(PromptCacheFile, P1LayersAreInNumericalOrder) {
  const TemporaryFolder folder;
  PromptCache cache;
  for (int layer = 0; layer < 12; ++layer) {
    auto kv = std::make_unique<KVCache>();
    append(*kv, range(100 * layer, 100 * layer + 4));
    cache.push_back(std::move(kv));
  }
  for (const SaveOptions& options : {SaveOptions(), legacy()}) {
    expect_same(load_prompt_cache(saved(folder, cache, {}, options)), cache);
  }
}

TEST(PromptCacheFile, P1TheSameCacheGivesTheSameBytes) {
  const TemporaryFolder folder;
  PromptCache cache = filled(2, 5);
  const Metadata metadata = {{"b", "1"}, {"a", "2"}};
  const std::string first = read_bytes(saved(folder, cache, metadata));
  PromptCache longer = filled(2, 9);
  trim_prompt_cache(longer, 4);
  EXPECT_EQ(read_bytes(saved(folder, longer, metadata)), first);
  EXPECT_EQ(read_bytes(saved(folder, load_prompt_cache(folder.file("cache.safetensors")), metadata)), first);
}

TEST(PromptCacheFile, P2OnlyValidRowsAreWritten) {
  const TemporaryFolder folder;
  PromptCache cache = filled(1, 5);
  trim_prompt_cache(cache, 2);
  for (const SaveOptions& options : {SaveOptions(), legacy()}) {
    const SafetensorsHeader header = read_safetensors_header(saved(folder, cache, {}, options));
    EXPECT_EQ(header.tensors[0].shape, (std::vector<std::int64_t>{1, 2, 3, 4}));
    EXPECT_EQ(header.tensors[1].shape, (std::vector<std::int64_t>{1, 2, 3, 4}));
  }
}

TEST(PromptCacheFile, P2AFileWithSlackLoadsToItsOffset) {
  const TemporaryFolder folder;
  const Rows all = rows(range(0, 256));
  write_safetensors(folder.file("slack.safetensors"),
                    {{"0.0", all.keys}, {"0.1", all.values}, {"0.2", mx::array(3, mx::int32)}},
                    {{"1.0", "KVCache"}, {"2.0", ""}, {"2.1.0", "0.2"}, {"2.1.1", "scalar"}});
  PromptCache cache = load_prompt_cache(folder.file("slack.safetensors"));
  EXPECT_EQ(tokens_of(cache.at<KVCache>(0).keys_and_values()), range(0, 3));
  EXPECT_EQ(cache[0].nbytes(), 256u * 2u * 8u * 4u);
  append(cache, {9});
  EXPECT_EQ(tokens_of(cache.at<KVCache>(0).keys_and_values()), (std::vector<int>{0, 1, 2, 9}));
}

TEST(PromptCacheFile, P3UserMetadataRoundTripsExactly) {
  const Metadata metadata = {{"a.b", "c"}, {"a", "x"},   {"a.c", ""},          {"0", "zero"},        {"1", "one"},
                             {"2.0", "s"}, {".", "dot"}, {"é中", "\"q\"\n\t"}, {"tail.", " \u00a0"}, {"2.1.0", "0.0"}};
  const TemporaryFolder folder;
  for (const SaveOptions& options : {SaveOptions(), legacy()}) {
    Metadata loaded;
    load_prompt_cache(saved(folder, filled(2, 3), metadata, options), &loaded);
    EXPECT_EQ(loaded, metadata);
  }
}

TEST(PromptCacheFile, P3KeysThatCannotBeAreRefusedAndNothingIsWritten) {
  const TemporaryFolder folder;
  for (const SaveOptions& options : {SaveOptions(), legacy()}) {
    EXPECT_EQ(error_of([&] { saved(folder, filled(1, 3), {{"", "x"}}, options); }).substr(0, 16), "invalid_argument");
    EXPECT_EQ(error_of([&] {
                saved(folder, filled(1, 3), {{"k", "\xff"}}, options);
              }).substr(0, 16),
              "invalid_argument");
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>());
}

TEST(PromptCacheFile, P4TheLegacyLayoutIsMlxLmsOlderOne) {
  const TemporaryFolder folder;
  const std::string file = saved(folder, filled(2, 3), {{"model", "m"}}, legacy());
  const SafetensorsHeader header = read_safetensors_header(file);
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[3].name, "1.1");
  EXPECT_EQ(header.metadata,
            (Metadata{{"0.0", ""}, {"0.1", ""}, {"1.model", "m"}, {"2.0", "KVCache"}, {"2.1", "KVCache"}}));
  EXPECT_EQ(load_prompt_cache_file(file).layout, PromptCacheLayout::legacy);
}

TEST(PromptCacheFile, P4AMissingLegacyMetaCountsAsNone) {
  const TemporaryFolder folder;
  const Rows some = rows(range(0, 3));
  write_safetensors(folder.file("old.safetensors"), {{"0.0", some.keys}, {"0.1", some.values}}, {{"2.0", "KVCache"}});
  EXPECT_EQ(load_prompt_cache(folder.file("old.safetensors"))[0].length(), 3);
}

TEST(PromptCacheFile, P5EmptyCachesRoundTrip) {
  const TemporaryFolder folder;
  const LoadedPromptCache loaded = load_prompt_cache_file(saved(folder, filled(2, 0)));
  ASSERT_EQ(loaded.cache.size(), 2u);
  EXPECT_TRUE(loaded.cache[1].empty());
  PromptCache nothing = filled(1, 3);
  trim_prompt_cache(nothing, 3);
  expect_same(load_prompt_cache(saved(folder, nothing)), nothing);
  EXPECT_EQ(load_prompt_cache(saved(folder, PromptCache(), {{"k", "v"}})).size(), 0u);
}

TEST(PromptCacheFile, P5TheExtensionRoundTrips) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.extension.tokens = Tokens{5, 0, 128000};
  options.extension.model_fingerprint = "f00d";
  options.extension.app_json = " {\"b\": 1.50, \"a\": [\"\\u00e9\", {}]}\n";
  const LoadedPromptCache loaded = load_prompt_cache_file(saved(folder, filled(2, 3), {{"k", "v"}}, options));
  EXPECT_EQ(loaded.extension.tokens, options.extension.tokens);
  EXPECT_EQ(loaded.extension.model_fingerprint, "f00d");
  EXPECT_EQ(loaded.extension.app_json, options.extension.app_json);  // verbatim
  EXPECT_EQ(loaded.metadata, (Metadata{{"k", "v"}}));
  expect_same(loaded.cache, filled(2, 3));
  const LoadedPromptCache plain = load_prompt_cache_file(saved(folder, filled(2, 3)));
  EXPECT_FALSE(plain.extension.tokens);
  EXPECT_EQ(plain.extension.model_fingerprint + plain.extension.app_json, "");
  options.extension = {.tokens = Tokens{}};
  EXPECT_EQ(load_prompt_cache_file(saved(folder, filled(1, 0), {}, options)).extension.tokens, Tokens());
}

TEST(PromptCacheFile, P5ForeignMembersAndTensorsAreIgnored) {
  const TemporaryFolder folder;
  const Rows some = rows(range(0, 3));
  for (const std::string sentinel :
       {R"({"reprise":1,"later":{"a":[1]},"layers":{}})", R"({"someone":"else","tokens":7})", R"({})"}) {
    write_safetensors(folder.file("f.safetensors"),
                      {{"0.0", some.keys},
                       {"0.1", some.values},
                       {"0.2", mx::array(3, mx::int32)},
                       {"1.0", some.keys},
                       {"7.3.1", some.keys}},
                      {{"1.0", "KVCache"}, {"2.0", sentinel}, {"2.1.0", "0.2"}, {"2.1.1", "scalar"}});
    EXPECT_EQ(load_prompt_cache(folder.file("f.safetensors"))[0].length(), 3) << sentinel;
  }
}

TEST(PromptCacheFile, P5AnExtensionThatIsWrongIsRefused) {
  const TemporaryFolder folder;
  const Rows some = rows(range(0, 3));
  const auto load_with = [&](const std::string& sentinel, const mx::array& tokens) {
    write_safetensors(folder.file("f.safetensors"),
                      {{"0.0", some.keys}, {"0.1", some.values}, {"0.2", mx::array(3, mx::int32)}, {"1.0", tokens}},
                      {{"1.0", "KVCache"}, {"2.0", sentinel}, {"2.1.0", "0.2"}, {"2.1.1", "scalar"}});
    return error_of([&] { load_prompt_cache(folder.file("f.safetensors")); });
  };
  const mx::array three({1, 2, 3});
  EXPECT_EQ(load_with(R"({"reprise":1,"tokens":"1.0"})", three), "nothing");
  const std::string corrupt[] = {
      "{",
      R"({"reprise":"1"})",
      R"({"reprise":1,"tokens":5})",
      R"({"reprise":1,"tokens":"1.1"})",
      R"({"reprise":1,"model_fingerprint":{}})",
      R"({"reprise":1,"app":"[]"})",
      R"({"reprise":1,"digest":"abc"})",
      R"({"reprise":1,"sealed":true})",
  };
  for (const std::string& sentinel : corrupt)
    EXPECT_EQ(load_with(sentinel, three).substr(0, 12), "corrupt_data") << sentinel;
  EXPECT_EQ(load_with(R"({"reprise":2})", three).substr(0, 11), "unsupported");
  EXPECT_EQ(load_with(R"({"reprise":1,"tokens":"1.0"})", mx::array({1, 2})).substr(0, 12), "corrupt_data");
  EXPECT_EQ(load_with(R"({"reprise":1,"tokens":"1.0"})", mx::array({1.0f, 2.0f, 3.0f})).substr(0, 12), "corrupt_data");
}

TEST(PromptCacheFile, P5SavingChecksTheExtension) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.extension.app_json = "[1]";
  EXPECT_EQ(error_of([&] { saved(folder, filled(1, 3), {}, options); }).substr(0, 16), "invalid_argument");
  options.extension = {.model_fingerprint = "\xff"};
  EXPECT_EQ(error_of([&] { saved(folder, filled(1, 3), {}, options); }).substr(0, 16), "invalid_argument");
  options.extension = {.tokens = Tokens{1, 2}};
  EXPECT_EQ(error_of([&] { saved(folder, filled(1, 3), {}, options); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(folder.names(), std::vector<std::string>());
}

TEST(PromptCacheFile, P7WhatTheLegacyLayoutCannotHoldIsRefusedByName) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { saved(folder, filled(2, 0), {}, legacy()); }),
            "unsupported: [save_prompt_cache] the legacy layout holds arrays only, but got null at 0.0 of a KVCache "
            "(it is empty)");
  SaveOptions options = legacy();
  options.extension.tokens = Tokens{1, 2, 3};
  EXPECT_EQ(error_of([&] { saved(folder, filled(1, 3), {}, options); }).substr(0, 11), "unsupported");
  EXPECT_EQ(error_of([&] { saved(folder, PromptCache(), {}, legacy()); }).substr(0, 11), "unsupported");
  EXPECT_EQ(folder.names(), std::vector<std::string>());
}

TEST(PromptCacheFile, X5LayersOutOfStepAreNotSaved) {
  const TemporaryFolder folder;
  PromptCache cache = filled(2, 3);
  cache[1].trim(1);
  EXPECT_EQ(error_of([&] { saved(folder, cache); }).substr(0, 19), "failed_precondition");
  EXPECT_EQ(folder.names(), std::vector<std::string>());
}

}  // namespace
}  // namespace reprise
