#include "reprise/hub/repository.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace reprise {
namespace {

namespace fs = std::filesystem;

TEST(HubRepository, TextWithTwoPartsIsOneAndNothingThatLeadsElsewhere) {
  EXPECT_EQ(parse_hub_repository("org/name"), (HubRepository{"org", "name", "main"}));
  EXPECT_EQ(parse_hub_repository("Qwen/Qwen3-0.6B@refs/pr/1"), (HubRepository{"Qwen", "Qwen3-0.6B", "refs/pr/1"}));
  for (const char* text : {"", "name", "/name", "org/", "a/b/c", "../name", "org/..", "org/.hidden", "org/na me",
                           "org/name@", "org/name@../x", "org/name@/x", "org/name@x/", "org/name@a//b", "o--rg/name",
                           "org/name@x y", "org/n\nme", "./model", "-org/name"}) {
    EXPECT_EQ(parse_hub_repository(text), std::nullopt) << text;
  }
}

class HubCache : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(cache);
    for (const char* commit : {"aaaa", "bbbb"}) fs::create_directories(folder / "snapshots" / commit);
    fs::create_directories(folder / "refs");
  }
  void TearDown() override { fs::remove_all(cache); }
  void ref(const std::string& name, const std::string& commit) { std::ofstream(folder / "refs" / name) << commit; }

  const fs::path cache = fs::path(testing::TempDir()) / "hub_cache_test";
  const fs::path folder = cache / "models--org--name";
};

TEST_F(HubCache, RevisionIsFoundByRefByCommitOrAsTheOnlyOne) {
  EXPECT_EQ(find_snapshot(cache, {"org", "name"}), std::nullopt);  // two, and no ref
  ref("main", "bbbb");
  ref("v1", "aaaa");
  EXPECT_EQ(find_snapshot(cache, {"org", "name"}), folder / "snapshots" / "bbbb");
  EXPECT_EQ(find_snapshot(cache, {"org", "name", "v1"}), folder / "snapshots" / "aaaa");
  EXPECT_EQ(find_snapshot(cache, {"org", "name", "aaaa"}), folder / "snapshots" / "aaaa");
  EXPECT_EQ(find_snapshot(cache, {"org", "name", "v2"}), std::nullopt);
  EXPECT_EQ(find_snapshot(cache, {"org", "other"}), std::nullopt);
  ref("main", "../../elsewhere");
  EXPECT_EQ(find_snapshot(cache, {"org", "name"}), std::nullopt);
  fs::remove_all(folder / "snapshots" / "aaaa");
  EXPECT_EQ(find_snapshot(cache, {"org", "name"}), folder / "snapshots" / "bbbb");
  EXPECT_EQ(find_snapshot(cache, {"org", "name", "v2"}), std::nullopt);
}

}  // namespace
}  // namespace reprise
