// Files that mlx-lm itself wrote (tests/oracle/prompt_cache_interchange.py --golden), one of each layout: two layers of
// seven sample rows of which two were trimmed off again.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "mlx/dtype.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/sample_rows.h"

namespace reprise {
namespace {

using namespace cache_test;

const std::map<std::string, std::string> kMetadata = {
    {"model", "test/model"}, {"text", "é中 \"quoted\"\nline"}, {"empty", ""}};

std::string golden(const char* version) {
  return REPRISE_SOURCE_DIR "/tests/data/cache/kv_bfloat16_mlx_lm_" + std::string(version) + ".safetensors";
}

void expect_loads_and_goes_on(const std::string& file, PromptCacheLayout layout) {
  LoadedPromptCache loaded = load_prompt_cache_file(file);
  EXPECT_EQ(loaded.layout, layout);
  EXPECT_EQ(loaded.metadata, kMetadata);
  ASSERT_EQ(loaded.cache.size(), 2u);
  EXPECT_EQ(loaded.cache[1].length(), 5);
  const auto shown = append_sample(loaded.cache, 3, mlx::core::bfloat16);
  for (int layer = 0; layer < 2; ++layer) {
    const SampleRows wanted = sample_rows(layer, 0, 8, mlx::core::bfloat16);
    EXPECT_TRUE(identical(shown[static_cast<std::size_t>(layer)].keys, wanted.keys));
    EXPECT_TRUE(identical(shown[static_cast<std::size_t>(layer)].values, wanted.values));
  }
}

// The same cache saved by us: equal names, dtypes and metadata, the sentinel apart.
void expect_same_tree(const std::string& file, PromptCacheLayout layout) {
  const TemporaryFolder folder;
  PromptCache cache = make_kv_prompt_cache(2);
  append_sample(cache, 7, mlx::core::bfloat16);
  trim_prompt_cache(cache, 2);
  SaveOptions options;
  options.layout = layout;
  const SafetensorsHeader ours =
      read_safetensors_header(save_prompt_cache(folder.file("ours"), cache, kMetadata, options));
  const SafetensorsHeader theirs = read_safetensors_header(file);
  std::set<std::pair<std::string, std::string>> our_tensors, their_tensors;
  for (const TensorRecord& record : ours.tensors) our_tensors.emplace(record.name, record.dtype);
  for (const TensorRecord& record : theirs.tensors) their_tensors.emplace(record.name, record.dtype);
  EXPECT_EQ(our_tensors, their_tensors);
  std::map<std::string, std::string> our_metadata = ours.metadata, their_metadata = theirs.metadata;
  if (layout == PromptCacheLayout::current) {
    our_metadata.erase("2.0");
    their_metadata.erase("2.0");
  }
  EXPECT_EQ(our_metadata, their_metadata);
}

TEST(PromptCacheGolden, P1AFileOfMlxLm0322LoadsAndGoesOn) {
  expect_loads_and_goes_on(golden("0.32.2"), PromptCacheLayout::current);
}

TEST(PromptCacheGolden, P1OurFileHasTheTreeOfMlxLm0322s) {
  expect_same_tree(golden("0.32.2"), PromptCacheLayout::current);
}

TEST(PromptCacheGolden, P7AFileOfMlxLm0313LoadsAndGoesOn) {
  expect_loads_and_goes_on(golden("0.31.3"), PromptCacheLayout::legacy);
}

TEST(PromptCacheGolden, P7OurLegacyFileHasTheTreeOfMlxLm0313s) {
  expect_same_tree(golden("0.31.3"), PromptCacheLayout::legacy);
}

// The worked example of docs/prompt_cache_format.md: a file of ours must stay what that page says, byte for byte.
TEST(PromptCacheGolden, P1TheWorkedExampleIsAsDocumented) {
  const TemporaryFolder folder;
  PromptCache cache = make_kv_prompt_cache(1);
  append_sample(cache, 3, mlx::core::float32);
  SaveOptions options;
  options.extension.tokens = Tokens{7, 7, 7};
  const std::string file = save_prompt_cache(folder.file("example"), cache, {{"model", "tiny"}}, options);
  const SafetensorsHeader header = read_safetensors_header(file);
  EXPECT_EQ(header.metadata.at("2.0"),
            R"({"reprise":1,"digest":"e84495174bba412b9ab167ad2f17e7dca6d27b1435126e9e88e0a17a81870cd4",)"
            R"("sealed":true,"tokens":"1.0"})");
  EXPECT_EQ(header.data_offset, 472u);
  EXPECT_EQ(read_bytes(file).size(), 728u);
}

}  // namespace
}  // namespace reprise
