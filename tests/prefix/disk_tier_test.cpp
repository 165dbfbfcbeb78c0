#include "reprise/prefix/tiers/disk_tier.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <future>
#include <map>
#include <set>

#include "reprise/base/error.h"
#include "tests/prefix/disk_tier_support.h"
#include "tests/prefix/execute_sql.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::Answer;
using testing::ask;
using testing::disk_options;
using testing::fake_content;
using testing::TemporaryFolder;
using testing::write_prefix;

testing::HastyFileSystem hasty;

std::vector<fs::path> content_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder / "files")) files.push_back(entry.path());
  return files;
}

std::uint64_t content_bytes(const fs::path& folder) {
  std::uint64_t bytes = 0;
  for (const fs::path& file : content_files(folder)) bytes += fs::file_size(file);
  return bytes;
}

TEST(DiskTier, ARestartedProcessFindsAndReadsWhatWasWritten) {
  TemporaryFolder folder;
  const Tokens tokens{1, 2, 3, 4, 5, 6, 7, 8, 9};
  {
    DiskTier tier(disk_options(folder / "cache", nullptr));
    write_prefix(tier, "a", tokens, 4, true);
  }
  DiskTier tier(disk_options(folder / "cache", nullptr));
  for (const bool needs_checkpoint : {false, true}) {
    const DiskTier::Found found = tier.find("a", tokens, needs_checkpoint);
    EXPECT_EQ(found.length, 9);
    ASSERT_EQ(found.blocks.size(), 3u);
    EXPECT_EQ(found.checkpoint.has_value(), needs_checkpoint);
    EXPECT_EQ(testing::read_all(tier, "a", tokens, found), Answer::right);
  }
  EXPECT_EQ(tier.find("b", tokens, false).length, 0);  // another space
  const DiskTierStats stats = tier.stats();
  EXPECT_EQ(stats.blocks, 3u);
  EXPECT_EQ(stats.checkpoints, 1u);
  EXPECT_EQ(stats.nbytes, content_bytes(folder / "cache"));
  EXPECT_EQ(stats.hits, 7u);
  EXPECT_EQ(stats.misses + stats.damaged + stats.failed_writes + stats.dropped_writes, 0u);
}

TEST(DiskTier, GivesBackTensorsAndMetadataAsTheyWere) {
  TemporaryFolder folder;
  const Tokens tokens{1, 2, 3};
  DiskTier tier(disk_options(folder / "cache", nullptr));
  const StoredRef content = fake_content("a", tokens, 0, 1000);
  tier.write_block("a", tokens, 0, content);
  tier.flush();
  const auto file = tier.read(tier.find("a", tokens, false).blocks.at(0).file);
  ASSERT_TRUE(file);
  const TensorFile want = testing::fake_tensors(*content);
  EXPECT_EQ(file->metadata, want.metadata);
  ASSERT_EQ(file->tensors.size(), want.tensors.size());
  for (const auto& [name, array] : want.tensors) {
    const auto& got = file->tensors.at(name);
    EXPECT_EQ(got.dtype(), array.dtype());
    ASSERT_EQ(got.shape(), array.shape());
    EXPECT_TRUE(got.is_available());
    EXPECT_EQ(std::memcmp(got.data<char>(), array.data<char>(), array.nbytes()), 0);
  }
}

// Every prefix that is stored, and nothing clever.
class NaiveModel {
 public:
  explicit NaiveModel(int block_size) : block_size_(block_size) {}

  void write_block(const Tokens& prefix, int begin) {
    if (begin > 0 && !blocks_.contains({begin - block_size_, first(prefix, begin)})) return;
    for (const auto& [at, other] : blocks_) {
      if (at == begin && common(other, prefix) == static_cast<int>(prefix.size())) return;
    }
    std::erase_if(blocks_, [&](const auto& block) {
      return block.first == begin && common(block.second, prefix) == static_cast<int>(block.second.size());
    });
    blocks_.emplace(begin, prefix);
  }
  void write_checkpoint(const Tokens& prefix) {
    const int whole = static_cast<int>(prefix.size()) / block_size_ * block_size_;
    if (whole == 0 || blocks_.contains({whole - block_size_, first(prefix, whole)})) checkpoints_.insert(prefix);
  }

  int find(const Tokens& tokens, bool needs_checkpoint) const {
    int length = 0;
    for (int begin = 0; begin == length; begin += block_size_) {
      if (begin > 0 && !blocks_.contains({begin - block_size_, first(tokens, begin)})) break;
      for (const auto& [at, prefix] : blocks_) {
        if (at == begin && common(prefix, tokens) > begin) length = std::max(length, common(prefix, tokens));
      }
      if (length < begin + block_size_) break;
    }
    while (needs_checkpoint && length > 0 && !checkpoints_.contains(first(tokens, length))) --length;
    return length;
  }
  std::size_t blocks() const { return blocks_.size(); }
  std::size_t checkpoints() const { return checkpoints_.size(); }

 private:
  static Tokens first(const Tokens& tokens, int size) { return {tokens.begin(), tokens.begin() + size}; }
  static int common(const Tokens& a, const Tokens& b) {
    const auto differ = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return static_cast<int>(differ.first - a.begin());
  }

  const int block_size_;
  std::set<std::pair<int, Tokens>> blocks_;  // begin, and all tokens up to the end
  std::set<Tokens> checkpoints_;
};

TEST(DiskTier, AgreesWithANaiveModelOnRandomPrefixes) {
  for (const int block_size : {1, 2, 4}) {
    TemporaryFolder folder;
    DiskTier tier(disk_options(folder / "cache", &hasty, block_size));
    NaiveModel model(block_size);
    std::mt19937 random(static_cast<unsigned>(block_size));
    int found_tokens = 0;
    for (int round = 0; round < 150; ++round) {
      Tokens tokens = testing::random_tokens(random, 11, 2);
      if (!tokens.empty() && round % 3 == 0) {
        write_prefix(tier, "a", tokens, block_size);
        for (int begin = 0; begin < static_cast<int>(tokens.size()); begin += block_size) {
          const auto size = std::min(tokens.size(), static_cast<std::size_t>(begin + block_size));
          model.write_block({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(size)}, begin);
        }
      } else if (!tokens.empty() && round % 3 == 1) {
        tier.write_checkpoint("a", tokens, fake_content("a", tokens, static_cast<int>(tokens.size())));
        model.write_checkpoint(tokens);
      }
      tier.flush();
      tokens = testing::random_tokens(random, 11, 2);
      for (const bool needs_checkpoint : {false, true}) {
        const DiskTier::Found found = tier.find("a", tokens, needs_checkpoint);
        ASSERT_EQ(found.length, model.find(tokens, needs_checkpoint)) << "round " << round;
        ASSERT_EQ(testing::read_all(tier, "a", tokens, found), Answer::right);
        ASSERT_EQ(found.checkpoint.has_value(), needs_checkpoint && found.length > 0);
        found_tokens += found.length;
      }
    }
    EXPECT_GT(found_tokens, 500);
    EXPECT_EQ(tier.stats().blocks, model.blocks());
    EXPECT_EQ(tier.stats().checkpoints, model.checkpoints());
    EXPECT_EQ(content_files(folder / "cache").size(), model.blocks() + model.checkpoints());
  }
}

TEST(DiskTier, ALongerBlockTakesThePlaceOfAShorterOne) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  for (const Tokens& tokens : {Tokens{1}, Tokens{1, 2, 3}, Tokens{1, 2}, Tokens{1, 2, 3, 4}}) {
    write_prefix(tier, "a", tokens, 4);
    tier.flush();
    EXPECT_EQ(tier.stats().blocks, 1u);
    EXPECT_EQ(content_files(folder / "cache").size(), 1u);
  }
  EXPECT_EQ(tier.stats().writes, 3u);  // {1, 2} was there
  EXPECT_EQ(tier.find("a", Tokens{1, 2, 9}, false).length, 2);
}

TEST(DiskTier, WhatIsThereIsNeitherConvertedNorWrittenAgain) {
  TemporaryFolder folder;
  int conversions = 0;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  options.to_tensors = [&](const Stored& stored) {
    ++conversions;
    return testing::fake_tensors(stored);
  };
  DiskTier tier(options);
  for (int i = 0; i < 3; ++i) write_prefix(tier, "a", Tokens{1, 2, 3, 4, 5}, 4, true);
  tier.flush();
  EXPECT_EQ(conversions, 3);
  EXPECT_EQ(tier.stats().writes, 3u);
}

TEST(DiskTier, ABlockToWhichNothingLeadsIsDropped) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  const Tokens tokens{1, 2, 3, 4, 5};
  tier.write_block("a", tokens, 4, fake_content("a", tokens, 4));
  tier.flush();
  EXPECT_EQ(tier.stats().dropped_writes, 1u);
  EXPECT_EQ(tier.stats().blocks, 0u);
  EXPECT_TRUE(content_files(folder / "cache").empty());
}

TEST(DiskTier, RefusesBlocksThatNoTreeHas) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  const Tokens tokens{1, 2, 3, 4, 5};
  for (const int begin : {-4, 1, 0, 8}) {
    testing::expect_error(ErrorCode::invalid_argument, "a block is",
                          [&] { tier.write_block("a", tokens, begin, fake_content("a", tokens, 0)); });
  }
  testing::expect_error(ErrorCode::invalid_argument, "none", [&] { tier.write_block("a", tokens, 4, nullptr); });
}

TEST(DiskTier, StaysWithinItsBudgetAndKeepsWhatLeadsToTheRest) {
  TemporaryFolder folder;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  options.max_bytes = 12'000;
  DiskTier tier(options);
  std::mt19937 random(7);
  for (int round = 0; round < 150; ++round) {
    write_prefix(tier, "a", testing::random_tokens(random, 16, 3), 4, round % 2 == 0, random() % 100);
    tier.flush();
    ASSERT_LE(tier.stats().nbytes, options.max_bytes);
    ASSERT_EQ(content_bytes(folder / "cache"), tier.stats().nbytes);
    const Tokens tokens = testing::random_tokens(random, 16, 3);
    ASSERT_EQ(ask(tier, "a", tokens, round % 2 == 0), Answer::right);
  }
  EXPECT_GT(tier.stats().evictions, 50u);
  EXPECT_EQ(tier.stats().misses, 0u);
}

TEST(DiskTier, TheLeastRecentlyUsedGoesFirst) {
  TemporaryFolder folder;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  {
    DiskTier tier(options);
    for (const TokenId token : {1, 2, 3}) write_prefix(tier, "a", Tokens{token}, 4);
    tier.flush();
    options.max_bytes = tier.stats().nbytes;
    EXPECT_EQ(ask(tier, "a", Tokens{1}), Answer::right);  // read
    write_prefix(tier, "a", Tokens{2}, 4);                // stored again
  }
  DiskTier tier(options);
  write_prefix(tier, "a", Tokens{4}, 4);
  tier.flush();
  EXPECT_EQ(tier.stats().evictions, 1u);
  for (const TokenId token : {1, 2, 4}) EXPECT_EQ(tier.find("a", Tokens{token}, false).length, 1) << token;
  EXPECT_EQ(tier.find("a", Tokens{3}, false).length, 0);
}

TEST(DiskTier, AClockThatWasWrongOnceMakesNothingImmortal) {
  for (const char* when : {"last_used + 1000000000000000", "9223372036854775807", "-9223372036854775808"}) {
    SCOPED_TRACE(when);
    TemporaryFolder folder;
    DiskTierOptions options = disk_options(folder / "cache", &hasty);
    {
      DiskTier tier(options);
      for (const TokenId token : {1, 2, 3}) write_prefix(tier, "a", Tokens{token}, 4);
      tier.flush();
      options.max_bytes = tier.stats().nbytes;
    }
    testing::execute_sql(folder / "cache/index.sqlite",
                         std::string("UPDATE entries SET last_used = ") + when + " WHERE tokens = x'00000001'");
    for (const TokenId token : {4, 5, 6}) {
      DiskTier tier(options);
      for (const TokenId used : {2, 3}) EXPECT_EQ(ask(tier, "a", Tokens{used}), Answer::right) << used;
      write_prefix(tier, "a", Tokens{token}, 4);
    }
    DiskTier tier(options);
    EXPECT_EQ(tier.find("a", Tokens{1}, false).length, 0);
    for (const TokenId token : {2, 3, 6}) EXPECT_EQ(tier.find("a", Tokens{token}, false).length, 1) << token;
  }
}

TEST(DiskTier, ASmallerBudgetHoldsFromTheStart) {
  TemporaryFolder folder;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  {
    DiskTier tier(options);
    for (TokenId token = 0; token < 10; ++token) write_prefix(tier, "a", Tokens{token}, 4, true);
  }
  options.max_bytes = content_bytes(folder / "cache") / 2;
  DiskTier tier(options);
  EXPECT_LE(tier.stats().nbytes, options.max_bytes);
  EXPECT_EQ(content_bytes(folder / "cache"), tier.stats().nbytes);
  // What alone is too much is not written.
  write_prefix(tier, "a", Tokens{50}, 4, false, 100'000);
  tier.flush();
  EXPECT_EQ(tier.stats().dropped_writes, 1u);
  EXPECT_GT(tier.stats().blocks, 0u);
}

TEST(DiskTier, WhatComesWhileTheQueueIsFullIsDroppedAndCounted) {
  TemporaryFolder folder;
  std::promise<void> go;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  options.max_queued_bytes = 3 * 500;
  options.to_tensors = [held = go.get_future().share()](const Stored& stored) {
    held.wait();
    return testing::fake_tensors(stored);
  };
  DiskTier tier(options);
  for (TokenId token = 0; token < 10; ++token) write_prefix(tier, "a", Tokens{token}, 4, false, 100);
  EXPECT_EQ(tier.stats().dropped_writes, 7u);
  go.set_value();
  tier.flush();
  EXPECT_EQ(tier.stats().writes, 3u);
  write_prefix(tier, "a", Tokens{20}, 4, false, 100);
  tier.flush();
  EXPECT_EQ(tier.stats().writes, 4u);
}

TEST(DiskTier, ClearRemovesASpaceOrAll) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  const Tokens tokens{1, 2, 3, 4, 5};
  for (const char* space : {"a", "b", "c"}) write_prefix(tier, space, tokens, 4, true);
  tier.clear("b");
  EXPECT_EQ(tier.find("b", tokens, false).length, 0);
  EXPECT_EQ(ask(tier, "a", tokens), Answer::right);
  EXPECT_EQ(tier.find("a", tokens, true).length, 5);
  EXPECT_EQ(content_files(folder / "cache").size(), 6u);
  tier.clear();
  EXPECT_EQ(tier.stats().nbytes, 0u);
  EXPECT_TRUE(content_files(folder / "cache").empty());
}

TEST(DiskTier, NobodyElseMayReadAnyOfIt) {
  TemporaryFolder folder;
  fs::create_directory(folder / "cache");
  ASSERT_EQ(::chmod((folder / "cache").c_str(), 0777), 0);
  const mode_t before = ::umask(0);
  DiskTier tier(disk_options(folder / "cache", &hasty));
  write_prefix(tier, "a", Tokens{1, 2, 3, 4, 5}, 4, true);
  tier.flush();
  ::umask(before);
  const auto mode_of = [](const fs::path& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0);
    return status.st_mode & 07777;
  };
  EXPECT_EQ(mode_of(folder / "cache"), 0700u);
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder / "cache")) {
    EXPECT_EQ(mode_of(entry.path()), entry.is_directory() ? 0700u : 0600u) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 9);  // three of content and their folder, two locks, index.sqlite and two beside it
}

TEST(DiskTier, TakesNoFolderThatIsAnothers) {
  TemporaryFolder folder;
  testing::write_text(folder / "file", "text");
  testing::expect_error(ErrorCode::invalid_argument, "needs a folder",
                        [&] { DiskTier(disk_options(folder / "file", nullptr)); });
  testing::expect_error(ErrorCode::invalid_argument, "of its own",
                        [&] { DiskTier(disk_options(folder.path(), nullptr)); });
  testing::expect_error(ErrorCode::internal, "cannot make",
                        [&] { DiskTier(disk_options(folder / "file/below", nullptr)); });
  DiskTier made(disk_options(folder / "one/two", nullptr));
  EXPECT_TRUE(fs::is_directory(folder / "one/two/files"));
}

}  // namespace
}  // namespace reprise
