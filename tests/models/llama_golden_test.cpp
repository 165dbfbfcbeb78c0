// Which caches the Llama family's layers have; their outputs are model_replay's.
#include <gtest/gtest.h>

#include "tests/models/model_kit.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;

TEST(LlamaModel, LayerTypesGiveTheirLayersARingOfTheWindow) {
  const fs::path folder = test::kit_folder() / "llama_sliding";
  if (!fs::exists(folder)) GTEST_SKIP() << "no kit at " << folder;
  const auto cache = make_prompt_cache(*make_model(read_model_files(folder)), 16);
  ASSERT_EQ(cache.size(), 3u);
  EXPECT_EQ(describe_cache(cache[0]), "RotatingKVCache(9)");
  EXPECT_EQ(describe_cache(cache[1]), "RotatingKVCache(16, keep 4)");
  EXPECT_EQ(describe_cache(cache[2]), "RotatingKVCache(9)");
}

}  // namespace
}  // namespace reprise
