// Several users of one folder: tiers of one process, processes side by side, and processes that are killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "reprise/prefix/tiers/disk_tier.h"
#include "tests/prefix/disk_tier_support.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::Answer;
using testing::ask;
using testing::disk_options;
using testing::TemporaryFolder;
using testing::write_prefix;

testing::HastyFileSystem hasty;

// The victim program at work; it is killed with the object.
class Victim {
 public:
  explicit Victim(std::vector<std::string> words) {
    words.insert(words.begin(), REPRISE_DISK_TIER_VICTIM);
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int ends[2] = {-1, -1};
    if (::pipe(ends) != 0) return;
    process_ = ::fork();
    if (process_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_ = ends[0];
  }
  ~Victim() {
    kill();
    ::close(output_);
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  // Until it says something, or ends.
  bool wait_for_a_word() const {
    char byte = 0;
    return ::read(output_, &byte, 1) == 1;
  }
  // Its exit status; -1 when a signal ended it.
  int wait() {
    int status = 0;
    if (process_ <= 0 || ::waitpid(std::exchange(process_, -1), &status, 0) < 0) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Whether it was still at work.
  bool kill() {
    if (process_ <= 0) return false;
    ::kill(process_, SIGKILL);
    return wait() == -1;
  }

 private:
  pid_t process_ = -1;
  int output_ = -1;
};

TEST(DiskTierProcesses, OneTierFindsWhatAnotherHasWritten) {
  TemporaryFolder folder;
  DiskTier one(disk_options(folder / "cache", &hasty));
  DiskTier other(disk_options(folder / "cache", &hasty));
  const Tokens tokens{1, 2, 3, 4, 5};
  write_prefix(one, "a", tokens, 4, true);
  one.flush();
  EXPECT_EQ(other.find("a", tokens, true).length, 5);
  EXPECT_EQ(ask(other, "a", tokens, true), Answer::right);
  write_prefix(other, "a", tokens, 4, true);
  other.flush();
  EXPECT_EQ(other.stats().writes, 0u);

  // What is taken away between find and read is a miss.
  const DiskTier::Found found = other.find("a", tokens, true);
  one.clear();
  EXPECT_FALSE(other.read(found.blocks.at(0).file));
  EXPECT_EQ(other.stats().misses, 1u);
  EXPECT_EQ(other.stats().damaged, 0u);
}

TEST(DiskTierProcesses, TiersOfOneProcessWriteReadAndEvictSideBySide) {
  TemporaryFolder folder;
  std::atomic<int> wrong{0};
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      DiskTierOptions options = disk_options(folder / "cache", &hasty);
      options.max_bytes = 20'000;
      DiskTier tier(options);
      for (int round = 0; round < 60; ++round) {
        write_prefix(tier, "a", testing::random_tokens(random, 12, 2), 4, round % 2 == 0);
        const Answer answer = ask(tier, "a", testing::random_tokens(random, 12, 2), round % 2 == 0);
        wrong += answer == Answer::wrong ? 1 : 0;
        right += answer == Answer::right ? 1 : 0;
      }
      tier.flush();
      EXPECT_EQ(tier.stats().last_error, "");
      EXPECT_EQ(tier.stats().damaged, 0u);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(right, 100);
}

TEST(DiskTierProcesses, TwoProcessesShareAFolder) {
  TemporaryFolder folder;
  const std::string cache = folder / "cache";
  Victim one({"share", cache, "1", "200"});
  Victim other({"share", cache, "2", "200"});
  EXPECT_EQ(one.wait(), 0);
  EXPECT_EQ(other.wait(), 0);
  DiskTier tier(disk_options(cache, &hasty));
  EXPECT_GT(tier.stats().blocks, 5u);
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder / "cache/files")) bytes += entry.file_size();
  EXPECT_EQ(bytes, tier.stats().nbytes);
}

TEST(DiskTierProcesses, AFolderThatCannotBeWrittenIsRead) {
  TemporaryFolder folder;
  {
    DiskTier tier(disk_options(folder / "cache", &hasty));
    write_prefix(tier, "space", Tokens{1, 2, 3, 4, 5, 6}, 4, true);
  }
  std::vector<fs::path> all{folder / "cache"};
  for (const auto& entry : fs::recursive_directory_iterator(folder / "cache")) all.push_back(entry.path());
  for (const fs::path& path : all) {
    // Root reads and writes what it likes, so the victim becomes somebody else: whose files these then are.
    if (::geteuid() == 0) {
      ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
    }
    ASSERT_EQ(::chmod(path.c_str(), fs::is_directory(path) ? 0500 : 0400), 0);
  }
  EXPECT_EQ(Victim({"read_only", folder / "cache", "0"}).wait(), 0);
  for (const fs::path& path : all) ::chmod(path.c_str(), 0700);
}

// REPRISE_KILLS: how often. Whatever a killed writer leaves, what is found is whole.
TEST(DiskTierProcesses, AKilledWriterLeavesNothingWrong) {
  const char* wanted = std::getenv("REPRISE_KILLS");
  const int kills = wanted != nullptr ? std::atoi(wanted) : 40;
  TemporaryFolder folder;
  const std::string cache = folder / "cache";
  std::mt19937 random(static_cast<unsigned>(kills));
  int found_tokens = 0;
  for (int round = 0; round < kills; ++round) {
    SCOPED_TRACE(round);
    {
      Victim victim({"write", cache, std::to_string(round)});
      // Some are killed while they open it.
      EXPECT_TRUE(round % 4 == 0 || victim.wait_for_a_word());
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
      EXPECT_TRUE(victim.kill());
    }
    DiskTier tier(disk_options(cache, &hasty));
    for (int i = 0; i < 60; ++i) {
      const Tokens tokens = testing::random_tokens(random, 14, 2);
      const DiskTier::Found found = tier.find("space", tokens, i % 2 == 0);
      ASSERT_EQ(testing::read_all(tier, "space", tokens, found), Answer::right);
      found_tokens += found.length;
    }
    const DiskTierStats stats = tier.stats();
    ASSERT_EQ(stats.last_error, "");
    ASSERT_EQ(stats.damaged, 0u);
    ASSERT_EQ(stats.misses, 0u);
    std::uint64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder / "cache/files")) bytes += entry.file_size();
    ASSERT_EQ(bytes, stats.nbytes);  // nothing is left over
  }
  EXPECT_GT(found_tokens, 20 * kills);
}

}  // namespace
}  // namespace reprise
