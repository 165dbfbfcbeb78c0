#include "reprise/engine/cache_sizes.h"

#include <gtest/gtest.h>

#include <set>

namespace reprise::internal {
namespace {

using kernels::PageLayout;

std::string space_with(const std::vector<PageLayout>& pages) {
  CacheSizes sizes;
  sizes.pages = pages;
  sizes.dtypes = "logits=float16";
  return space_of("model", sizes, {}, 256);
}

TEST(CacheSpace, NamesTheVersionOfTheCodeThatComputesRows) {
  EXPECT_NE(space_with({}).find("|rows_version=" + std::to_string(kRowsVersion) + "|"), std::string::npos);
}

TEST(CacheSpace, NamesTheLayoutOfEveryLayer) {
  const PageLayout one{.kv_heads = 2, .key_size = 64, .value_size = 64};
  std::vector<PageLayout> others(6, one);
  others[0].kv_heads = 4;
  others[1].key_size = 32;
  others[2].value_size = 32;
  others[3].dtype = mlx::core::float16;
  others[4].quantization = KVQuantization{.group_size = 32, .bits = 8};
  others[5].quantization = KVQuantization{.group_size = 32, .bits = 4};
  std::set<std::string> spaces{space_with({one}), space_with({one, one}), space_with({one, one, one})};
  for (const PageLayout& other : others) {
    spaces.insert({space_with({one, one, other}), space_with({one, other, one}), space_with({other})});
  }
  EXPECT_EQ(spaces.size(), 3 + 3 * others.size());
}

}  // namespace
}  // namespace reprise::internal
