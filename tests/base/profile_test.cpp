#include "reprise/base/profile.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace reprise {
namespace {

using std::chrono::milliseconds;

class Profiling : public testing::Test {
 protected:
  void SetUp() override { Profile::reset(); }
  void TearDown() override {
    Profile::enable(false);
    Profile::reset();
  }
};

TEST_F(Profiling, NothingIsRecordedUnlessAsked) {
  { const ProfileScope scope("linear"); }
  EXPECT_TRUE(Profile::entries().empty());
}

TEST_F(Profiling, AScopeCountsItsTime) {
  Profile::enable(true);
  for (int i = 0; i < 2; ++i) {
    const ProfileScope scope("linear");
    std::this_thread::sleep_for(milliseconds(2));
  }
  const auto entries = Profile::entries();
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].operation, "linear");
  EXPECT_EQ(entries[0].calls, 2);
  EXPECT_GE(entries[0].seconds, 0.004);
  EXPECT_LT(entries[0].seconds, 20.0);
}

TEST_F(Profiling, AScopeThatBeganWhileItWasOffIsNotCounted) {
  {
    const ProfileScope scope("linear");
    Profile::enable(true);
  }
  EXPECT_TRUE(Profile::entries().empty());
}

TEST_F(Profiling, EntriesComeLongestFirst) {
  Profile::add("short", milliseconds(1));
  Profile::add("long", milliseconds(5));
  Profile::add("middle", milliseconds(1));
  Profile::add("middle", milliseconds(1));
  std::vector<std::string> names;
  for (const ProfileEntry& entry : Profile::entries()) names.push_back(entry.operation);
  EXPECT_EQ(names, (std::vector<std::string>{"long", "middle", "short"}));
}

TEST_F(Profiling, ResetForgets) {
  Profile::add("linear", milliseconds(1));
  Profile::reset();
  EXPECT_TRUE(Profile::entries().empty());
}

TEST_F(Profiling, ThreadsAddUp) {
  Profile::enable(true);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (int n = 0; n < 250; ++n) const ProfileScope scope("linear");
      });
    }
  }
  const auto entries = Profile::entries();
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].calls, 1000);
}

}  // namespace
}  // namespace reprise
