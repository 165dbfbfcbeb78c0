#include "reprise/base/processors.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace reprise::internal {
namespace {

namespace fs = std::filesystem;

class Processors : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("reprise_processors_" + std::to_string(getpid()));
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_;
};

TEST_F(Processors, WithoutFilesThereIsNoBound) {
  EXPECT_EQ(cgroup_processors(root_, "0::/some/where\n3:cpu:/\n"), 0);
  EXPECT_EQ(cgroup_processors(root_, ""), 0);
  EXPECT_EQ(cgroup_processors(root_, "nonsense\n::\n:\n"), 0);
}

TEST_F(Processors, TheTightestGroupAboveCounts) {
  write("cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_processors(root_, "0::/a/b\n"), 0);
  write("a/cpu.max", "300000 100000\n");
  write("a/b/cpu.max", "800000 100000\n");
  EXPECT_EQ(cgroup_processors(root_, "0::/a/b\n"), 3);
}

TEST_F(Processors, PartsOfAProcessorAreRounded) {
  write("cpu.max", "20000 100000\n");
  EXPECT_EQ(cgroup_processors(root_, "0::/\n"), 1);
  write("cpu.max", "260000 100000\n");
  EXPECT_EQ(cgroup_processors(root_, "0::/\n"), 3);
}

TEST_F(Processors, VersionOneIsUnderstood) {
  write("cpu,cpuacct/job/cpu.cfs_quota_us", "200000\n");
  write("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_processors(root_, "7:cpuset:/job\n4:cpu,cpuacct:/job\n0::/\n"), 2);
  EXPECT_EQ(cgroup_processors(root_, "4:cpu,cpuacct:/other\n"), 0);
}

TEST_F(Processors, DamagedFilesAreNoBound) {
  for (const char* text : {"", "max", "0 0", "x y", "100000", "100000 -5"}) {
    write("cpu.max", text);
    EXPECT_EQ(cgroup_processors(root_, "0::/\n"), 0) << text;
  }
}

#ifdef __linux__
TEST_F(Processors, NoMoreThanTheProcessMayRunOn) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(available_processors(), 1);
  EXPECT_LE(available_processors(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(available_processors(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}
#endif

}  // namespace
}  // namespace reprise::internal
