// What may have happened to the folder: each time a counted miss, never an exception, never a wrong answer.
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/prefix/tiers/disk_keys.h"
#include "reprise/prefix/tiers/disk_tier.h"
#include "tests/prefix/disk_tier_support.h"
#include "tests/prefix/execute_sql.h"
#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::Answer;
using testing::ask;
using testing::disk_options;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_prefix;
using testing::write_text;

testing::HastyFileSystem hasty;
const Tokens kTokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};

// The file of the block of `tokens` that begins at `begin`.
fs::path file_of(DiskTier& tier, const fs::path& folder, std::span<const TokenId> tokens, int begin) {
  for (const auto& piece : tier.find("a", tokens, false).blocks) {
    if (piece.begin == begin) return folder / "files" / (piece.file.substr(0, 64) + ".safetensors");
  }
  return {};
}

void execute(const fs::path& folder, const std::string& sql) { testing::execute_sql(folder / "index.sqlite", sql); }

// It can be used again, whatever it was.
void expect_works(DiskTier& tier) {
  write_prefix(tier, "a", kTokens, 4, true);
  tier.flush();
  EXPECT_EQ(tier.find("a", kTokens, true).length, 10);
  EXPECT_EQ(ask(tier, "a", kTokens, true), Answer::right);
}

struct Damage {
  const char* name;
  std::function<void(const fs::path&)> make;
  std::uint64_t damaged = 1;
};

TEST(DiskTierDamage, OfAFileIsACountedMissAndItsRowGoes) {
  const std::vector<Damage> kinds{
      {"first byte flipped", [](const fs::path& file) { write_text(file, "\xff" + read_text(file).substr(1)); }},
      {"last byte flipped",
       [](const fs::path& file) {
         std::string text = read_text(file);
         text.back() = static_cast<char>(text.back() ^ 1);
         write_text(file, text);
       }},
      {"cut", [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) - 1); }},
      {"longer", [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) + 1); }},
      {"empty", [](const fs::path& file) { fs::resize_file(file, 0); }},
      {"missing", [](const fs::path& file) { fs::remove(file); }, 0},
      {"a folder", [](const fs::path& file) { fs::remove(file), fs::create_directory(file); }},
      {"a link",
       [](const fs::path& file) {
         fs::rename(file, file.parent_path() / "elsewhere");
         fs::create_symlink(file.parent_path() / "elsewhere", file);
       }},
  };
  for (const Damage& damage : kinds) {
    SCOPED_TRACE(damage.name);
    TemporaryFolder folder;
    DiskTier tier(disk_options(folder / "cache", &hasty));
    write_prefix(tier, "a", kTokens, 4);
    tier.flush();
    damage.make(file_of(tier, folder / "cache", kTokens, 4));
    const DiskTier::Found found = tier.find("a", kTokens, false);
    ASSERT_EQ(found.blocks.size(), 3u);
    EXPECT_TRUE(tier.read(found.blocks[0].file));
    EXPECT_FALSE(tier.read(found.blocks[1].file));
    EXPECT_EQ(tier.find("a", kTokens, false).length, 4);  // at once
    tier.flush();
    const DiskTierStats stats = tier.stats();
    EXPECT_EQ(stats.misses, 1u);
    EXPECT_EQ(stats.damaged, damage.damaged);
    EXPECT_EQ(stats.blocks, 2u);
    if (std::string(damage.name) != "a folder") {
      EXPECT_FALSE(fs::exists(fs::symlink_status(file_of(tier, folder / "cache", kTokens, 4))));
      expect_works(tier);
    }
  }
}

TEST(DiskTierDamage, EveryFlippedBitOfAFileIsSeen) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  std::size_t size = 1;
  for (std::size_t at = 0; at < size; at += 7) {
    write_prefix(tier, "a", Tokens{1, 2}, 4);
    tier.flush();
    const fs::path file = file_of(tier, folder / "cache", Tokens{1, 2}, 0);
    std::string text = read_text(file);
    size = text.size();
    text[at] = static_cast<char>(text[at] ^ (1 << (at % 8)));
    write_text(file, text);
    ASSERT_EQ(ask(tier, "a", Tokens{1, 2}), Answer::missed) << at;
  }
  EXPECT_GT(tier.stats().damaged, 30u);
}

TEST(DiskTierDamage, AWholeFileInThePlaceOfAnotherIsNotTakenForIt) {
  TemporaryFolder folder;
  const fs::path cache = folder / "cache";
  {
    DiskTier tier(disk_options(cache, &hasty));
    write_prefix(tier, "a", Tokens{1, 2}, 4);
    write_prefix(tier, "a", Tokens{7, 8}, 4);
    tier.flush();
    // Under the other's name.
    fs::copy_file(file_of(tier, cache, Tokens{1, 2}, 0), file_of(tier, cache, Tokens{7, 8}, 0),
                  fs::copy_options::overwrite_existing);
    EXPECT_EQ(ask(tier, "a", Tokens{7, 8}), Answer::missed);
    write_prefix(tier, "a", Tokens{7, 8}, 4);
  }
  // A name that is none.
  execute(cache, "UPDATE entries SET file = CAST('../' AS BLOB) || file");
  {
    DiskTier tier(disk_options(cache, &hasty));
    EXPECT_EQ(tier.find("a", Tokens{1, 2}, false).length, 0);  // the index contradicts itself
    tier.flush();
    EXPECT_EQ(tier.stats().damaged, 1u);
    write_prefix(tier, "a", Tokens{1, 2}, 4);
    write_prefix(tier, "a", Tokens{7, 8}, 4);
  }
  // Each named by the other's row.
  execute(cache,
          "CREATE TEMP TABLE swap AS SELECT id, file, nbytes FROM entries; UPDATE entries SET file = id;"
          "UPDATE entries SET file = (SELECT file FROM swap WHERE swap.id <> entries.id),"
          "nbytes = (SELECT nbytes FROM swap WHERE swap.id <> entries.id)");
  DiskTier tier(disk_options(cache, &hasty));
  EXPECT_EQ(tier.find("a", Tokens{1, 2}, false).length, 2);
  EXPECT_EQ(ask(tier, "a", Tokens{1, 2}), Answer::missed);
  EXPECT_EQ(tier.stats().damaged, 1u);
  tier.flush();
  expect_works(tier);
}

TEST(DiskTierDamage, ARowWithAnotherPromptsTokensIsNotServed) {
  TemporaryFolder folder;
  {
    DiskTier tier(disk_options(folder / "cache", &hasty));
    write_prefix(tier, "a", Tokens{1, 2}, 4);
  }
  execute(folder / "cache", "UPDATE entries SET tokens = x'0000000100000003'");
  DiskTier tier(disk_options(folder / "cache", &hasty));
  EXPECT_EQ(tier.find("a", Tokens{1, 3}, false).length, 0);
  tier.flush();
  EXPECT_EQ(tier.stats().damaged, 1u);
  expect_works(tier);
}

TEST(DiskTierDamage, AnIndexThatIsNoneIsEmptiedAndItsFilesAreSwept) {
  const std::vector<Damage> kinds{
      {"garbage", [](const fs::path& index) { write_text(index, std::string(50'000, 'x')); }},
      {"a little garbage", [](const fs::path& index) { write_text(index, "x"); }, 0},
      {"a folder's worth of zeros", [](const fs::path& index) { write_text(index, std::string(20'000, '\0')); }},
      {"cut", [](const fs::path& index) { fs::resize_file(index, 10'000); }},
      {"empty", [](const fs::path& index) { fs::resize_file(index, 0); }, 0},
      {"missing", [](const fs::path& index) { fs::remove(index); }, 0},
      {"an older version", [](const fs::path& index) { execute(index.parent_path(), "PRAGMA user_version = 0"); }},
      {"a newer version", [](const fs::path& index) { execute(index.parent_path(), "PRAGMA user_version = 99"); }},
      {"other tables",
       [](const fs::path& index) {
         fs::remove(index);
         execute(index.parent_path(), "CREATE TABLE entries(a, b); PRAGMA user_version = 2");
         execute(index.parent_path(), "PRAGMA application_id = " + std::to_string(internal::kApplicationId));
       }},
      {"no totals", [](const fs::path& index) { execute(index.parent_path(), "DROP TABLE totals"); }},
  };
  for (const Damage& damage : kinds) {
    SCOPED_TRACE(damage.name);
    TemporaryFolder folder;
    {
      DiskTier tier(disk_options(folder / "cache", &hasty));
      write_prefix(tier, "a", kTokens, 4, true);
    }
    damage.make(folder / "cache/index.sqlite");
    {
      DiskTier tier(disk_options(folder / "cache", &hasty));
      EXPECT_EQ(tier.find("a", kTokens, false).length, 0);
      tier.flush();
      EXPECT_EQ(tier.stats().damaged, damage.damaged);
      EXPECT_EQ(tier.stats().last_error, "");
      expect_works(tier);
    }
    DiskTier tier(disk_options(folder / "cache", &hasty));
    EXPECT_EQ(ask(tier, "a", kTokens, true), Answer::right);
    EXPECT_EQ(tier.stats().damaged, 0u);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder / "cache/files"), {}), 4);
  }
}

TEST(DiskTierDamage, OfTheIndexAnywhereNeverThrowsAndNeverLies) {
  TemporaryFolder folder;
  {
    DiskTier tier(disk_options(folder / "cache", &hasty));
    std::mt19937 random(1);
    for (int i = 0; i < 30; ++i) write_prefix(tier, "a", testing::random_tokens(random, 12, 2), 4, i % 2 == 0);
  }
  const std::string sound = read_text(folder / "cache/index.sqlite");
  fs::copy(folder / "cache/files", folder / "files");
  std::uint64_t damaged = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    std::string text = sound;
    for (int i = 0; i < 20; ++i) text[random() % text.size()] = static_cast<char>(random());
    write_text(folder / "cache/index.sqlite", text);
    fs::copy(folder / "files", folder / "cache/files", fs::copy_options::skip_existing);
    {
      DiskTier tier(disk_options(folder / "cache", &hasty));
      for (int i = 0; i < 20; ++i) {
        const Tokens tokens = testing::random_tokens(random, 12, 2);
        ASSERT_NE(ask(tier, "a", tokens, i % 2 == 0), Answer::wrong) << "seed " << seed;
        write_prefix(tier, "a", testing::random_tokens(random, 12, 2), 4, i % 2 == 0);
      }
      tier.flush();
      damaged += tier.stats().damaged;
    }
    fs::remove(folder / "cache/index.sqlite-wal");
    fs::remove(folder / "cache/index.sqlite-shm");
  }
  EXPECT_GT(damaged, 20u);
}

TEST(DiskTierDamage, WhileItIsOpenIsMendedToo) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  write_prefix(tier, "a", kTokens, 4);
  tier.flush();
  execute(folder / "cache", "DROP TABLE entries");
  EXPECT_EQ(tier.find("a", kTokens, false).length, 0);
  tier.flush();
  EXPECT_EQ(tier.stats().damaged, 1u);
  EXPECT_TRUE(fs::is_empty(folder / "cache/files"));
  expect_works(tier);

  fs::remove_all(folder / "cache");
  EXPECT_NE(ask(tier, "a", kTokens), Answer::wrong);
  write_prefix(tier, "a", Tokens{5, 6}, 4);
  tier.flush();
  EXPECT_GT(tier.stats().failed_writes + tier.stats().misses, 0u);
}

TEST(DiskTierDamage, WhatAKilledWriterLeftIsSwept) {
  TemporaryFolder folder;
  { DiskTier tier(disk_options(folder / "cache", &hasty)); }
  const fs::path files = folder / "cache/files";
  write_text(files / (std::string(64, 'a') + ".safetensors"), "no row");
  write_text(files / ("." + std::string(64, 'b') + ".safetensors.0123456789abcdef.tmp"), "half");
  DiskTier tier(disk_options(folder / "cache", &hasty));
  EXPECT_TRUE(fs::is_empty(files));
}

TEST(DiskTierDamage, NamesThatFindHasNotGivenAreMisses) {
  TemporaryFolder folder;
  DiskTier tier(disk_options(folder / "cache", &hasty));
  write_prefix(tier, "a", Tokens{1}, 4);
  tier.flush();
  const std::string name = tier.find("a", Tokens{1}, false).blocks.at(0).file;
  const std::string none(64, '0');
  for (const std::string& file : {std::string(), std::string("../index.sqlite"), name.substr(0, 64), none + "-" + none,
                                  "/" + name, name + "/../x"}) {
    EXPECT_FALSE(tier.read(file)) << file;
  }
  EXPECT_EQ(tier.stats().misses, 6u);
  EXPECT_TRUE(tier.read(name));
}

// A disk on which one kind of operation fails while `broken`.
class BrokenFileSystem final : public testing::HastyFileSystem {
 public:
  explicit BrokenFileSystem(ErrorCode code, bool at_rename) : code_(code), at_rename_(at_rename) {}
  std::pair<std::unique_ptr<WritableFile>, fs::path> create_temporary(const fs::path& target) override {
    if (broken && !at_rename_) throw Error(code_, "[test] cannot create " + target.string());
    return HastyFileSystem::create_temporary(target);
  }
  void rename(const fs::path& from, const fs::path& to) override {
    if (broken && at_rename_) throw Error(code_, "[test] cannot rename " + to.string());
    HastyFileSystem::rename(from, to);
  }
  std::atomic<bool> broken = false;

 private:
  const ErrorCode code_;
  const bool at_rename_;
};

TEST(DiskTierDamage, AFullDiskIsCountedAndSaidOnceWhileReadingGoesOn) {
  for (const bool at_rename : {false, true}) {
    TemporaryFolder folder;
    std::atomic<int> lines{0};
    set_log_hook([&](LogLevel, const std::string&) { ++lines; });
    BrokenFileSystem files(ErrorCode::resource_exhausted, at_rename);
    DiskTier tier(disk_options(folder / "cache", &files));
    write_prefix(tier, "a", kTokens, 4);
    tier.flush();
    files.broken = true;
    for (TokenId token = 20; token < 25; ++token) write_prefix(tier, "a", Tokens{token}, 4);
    tier.flush();
    set_log_hook({});
    EXPECT_EQ(tier.stats().failed_writes, 5u);
    EXPECT_NE(tier.stats().last_error.find("[test]"), std::string::npos);
    EXPECT_EQ(lines, 1);
    EXPECT_EQ(tier.find("a", Tokens{20}, false).length, 0);
    EXPECT_EQ(ask(tier, "a", kTokens), Answer::right);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder / "cache/files"), {}), 3);
    files.broken = false;
    expect_works(tier);
  }
}

TEST(DiskTierDamage, WhatCannotBeMadeATensorIsAFailedWrite) {
  TemporaryFolder folder;
  DiskTierOptions options = disk_options(folder / "cache", &hasty);
  options.to_tensors = [](const Stored&) -> TensorFile { throw std::runtime_error("no"); };
  DiskTier tier(options);
  write_prefix(tier, "a", Tokens{1}, 4);
  tier.flush();
  EXPECT_EQ(tier.stats().failed_writes, 1u);
  EXPECT_EQ(tier.stats().last_error, "no");
}

}  // namespace
}  // namespace reprise
