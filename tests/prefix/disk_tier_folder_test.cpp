// Which folders a disk tier takes, and that it leaves all others as they are.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>

#include "reprise/base/error.h"
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
using testing::expect_error;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_prefix;
using testing::write_text;

testing::HastyFileSystem hasty;
const Tokens kTokens{1, 2, 3, 4, 5, 6};
const std::string kHash(64, 'a');

void make_cache(const fs::path& folder) {
  DiskTier tier(disk_options(folder, &hasty));
  write_prefix(tier, "a", kTokens, 4, true);
}

mode_t mode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(::lstat(path.c_str(), &status), 0) << path;
  return status.st_mode;
}

// Of everything in it: the mode, and what a file holds or a link names.
std::map<std::string, std::pair<mode_t, std::string>> all_of(const fs::path& folder) {
  std::map<std::string, std::pair<mode_t, std::string>> all{{"", {mode_of(folder), ""}}};
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    std::string text;
    if (entry.is_symlink()) text = fs::read_symlink(entry.path());
    if (entry.is_regular_file() && !entry.is_symlink()) text = read_text(entry.path());
    const std::string name = fs::relative(entry.path(), folder).string();
    // Whoever reads a database may make them.
    if (name.ends_with("-shm") || name.ends_with("-wal")) continue;
    all[name] = {mode_of(entry.path()), text};
  }
  return all;
}

struct Case {
  const char* in_the_way;
  std::function<void(const fs::path&)> make;
};

TEST(DiskTierFolder, OfAUserIsRefusedAndLeftAsItIs) {
  const std::vector<Case> cases{
      {"files",
       [](const fs::path& folder) {
         fs::create_directory(folder / "files");
         write_text(folder / "files" / (kHash + ".safetensors"), "a model");
         write_text(folder / "files/.draft.tmp", "text");
       }},
      {"index.sqlite", [](const fs::path& folder) { write_text(folder / "index.sqlite", "text"); }},
      {"index.sqlite",
       [](const fs::path& folder) { testing::execute_sql(folder / "index.sqlite", "CREATE TABLE mine(a)"); }},
      {"opening.lock", [](const fs::path& folder) { write_text(folder / "opening.lock", "text"); }},
      {"notes.txt",
       [](const fs::path& folder) {
         write_text(folder / "opening.lock", "");
         write_text(folder / "notes.txt", "text");
       }},
      {"files",
       [](const fs::path& folder) {
         write_text(folder / "opening.lock", "");
         fs::create_directory(folder / "files");
       }},
      {"notes.txt",
       [](const fs::path& folder) {
         make_cache(folder);
         write_text(folder / "notes.txt", "text");
       }},
      {"files/notes.txt",
       [](const fs::path& folder) {
         make_cache(folder);
         write_text(folder / "files/notes.txt", "text");
       }},
      {"files/.notes.tmp",
       [](const fs::path& folder) {
         make_cache(folder);
         write_text(folder / "files/.notes.tmp", "text");
       }},
      {"index.sqlite",
       [](const fs::path& folder) {
         make_cache(folder);
         fs::remove(folder / "index.sqlite");
         testing::execute_sql(folder / "index.sqlite", "CREATE TABLE mine(a); PRAGMA application_id = 77");
       }},
      {"index.sqlite",
       [](const fs::path& folder) {
         make_cache(folder);
         fs::rename(folder / "index.sqlite", folder.parent_path() / "elsewhere");
         fs::create_symlink(folder.parent_path() / "elsewhere", folder / "index.sqlite");
       }},
      {"files",
       [](const fs::path& folder) {
         make_cache(folder);
         fs::rename(folder / "files", folder.parent_path() / "pictures");
         fs::create_symlink(folder.parent_path() / "pictures", folder / "files");
       }},
  };
  for (const Case& one : cases) {
    TemporaryFolder folder;
    fs::create_directory(folder / "cache");
    one.make(folder / "cache");
    ASSERT_EQ(::chmod((folder / "cache").c_str(), 0755), 0);
    const auto before = all_of(folder / "cache");
    SCOPED_TRACE(::testing::PrintToString(before.size()) + " with " + one.in_the_way);
    expect_error(ErrorCode::invalid_argument, folder / "cache" / one.in_the_way,
                 [&] { DiskTier(disk_options(folder / "cache", &hasty)); });
    EXPECT_EQ(all_of(folder / "cache"), before);
  }
}

TEST(DiskTierFolder, ThatWasLeftHalfMadeIsTaken) {
  const std::vector<Case> cases{
      {"nothing", [](const fs::path&) {}},
      {"an empty lock", [](const fs::path& folder) { write_text(folder / "opening.lock", ""); }},
      {"half a mark", [](const fs::path& folder) { write_text(folder / "opening.lock", "reprise"); }},
      {"no files", [](const fs::path& folder) { make_cache(folder), fs::remove_all(folder / "files"); }},
      {"no index", [](const fs::path& folder) { make_cache(folder), fs::remove(folder / "index.sqlite"); }},
      {"an empty index",
       [](const fs::path& folder) { make_cache(folder), fs::resize_file(folder / "index.sqlite", 0); }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.in_the_way);
    TemporaryFolder folder;
    fs::create_directory(folder / "cache");
    one.make(folder / "cache");
    {
      // Rows without files are found out here.
      DiskTier tier(disk_options(folder / "cache", &hasty));
      EXPECT_NE(ask(tier, "a", kTokens, true), Answer::wrong);
    }
    make_cache(folder / "cache");
    DiskTier tier(disk_options(folder / "cache", &hasty));
    EXPECT_EQ(tier.find("a", kTokens, true).length, 6);
    EXPECT_EQ(ask(tier, "a", kTokens, true), Answer::right);
  }
}

TEST(DiskTierFolder, ThatOthersCouldWriteIsEmptied) {
  for (const char* name : {"", "files", "index.sqlite"}) {
    for (const mode_t others : {0020u, 0002u, 0055u}) {
      SCOPED_TRACE(std::string(name) + " " + std::to_string(others));
      TemporaryFolder folder;
      const fs::path cache = folder / "cache";
      make_cache(cache);
      const fs::path path = *name == '\0' ? cache : cache / name;
      ASSERT_EQ(::chmod(path.c_str(), (mode_of(path) & 0777) | others), 0);
      const bool exposed = (others & 022) != 0;
      DiskTier tier(disk_options(cache, &hasty));
      EXPECT_EQ(tier.find("a", kTokens, true).length, exposed ? 0 : 6);
      EXPECT_EQ(tier.stats().damaged, exposed ? 1u : 0u);
      EXPECT_EQ(fs::is_empty(cache / "files"), exposed);
      EXPECT_EQ(mode_of(path) & 077, 0u);
      write_prefix(tier, "a", kTokens, 4, true);
      tier.flush();
      EXPECT_EQ(ask(tier, "a", kTokens, true), Answer::right);
      EXPECT_EQ(tier.find("a", kTokens, true).length, 6);
      EXPECT_EQ(DiskTier(disk_options(cache, &hasty)).stats().damaged, 0u);
    }
  }
}

TEST(DiskTierFolder, WithAnIndexOrFilesOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  for (const char* name : {"files", "index.sqlite", "opening.lock"}) {
    TemporaryFolder folder;
    make_cache(folder / "cache");
    ASSERT_EQ(::chown((folder / "cache" / name).c_str(), 65534, 65534), 0);
    const auto before = all_of(folder / "cache");
    expect_error(ErrorCode::invalid_argument, folder / "cache" / name,
                 [&] { DiskTier(disk_options(folder / "cache", &hasty)); });
    EXPECT_EQ(all_of(folder / "cache"), before);
  }
}

TEST(DiskTierFolder, IsSweptOfNothingButItsOwnFiles) {
  TemporaryFolder folder;
  const fs::path files = folder / "cache/files";
  DiskTier tier(disk_options(folder / "cache", &hasty));
  write_prefix(tier, "a", kTokens, 4);
  tier.flush();
  const std::vector<std::string> others{".notes.tmp",
                                        "." + kHash + ".safetensors.tmp",
                                        kHash,
                                        kHash + ".txt",
                                        "." + kHash + ".safetensors.0123456789abcdeX.tmp",
                                        "model.safetensors"};
  const std::vector<std::string> own{"." + kHash + ".safetensors.0123456789abcdef.tmp", kHash + ".safetensors"};
  for (const auto* names : {&others, &own}) {
    for (const std::string& name : *names) {
      write_text(files / name, "text");
      fs::last_write_time(files / name, fs::file_time_type::clock::now() - std::chrono::hours(1));
    }
  }
  testing::execute_sql(folder / "cache/index.sqlite", "DROP TABLE entries");
  EXPECT_EQ(tier.find("a", kTokens, false).length, 0);
  tier.flush();
  EXPECT_EQ(tier.stats().damaged, 1u);
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(files / name)) << name;
  EXPECT_EQ(std::distance(fs::directory_iterator(files), {}), static_cast<std::ptrdiff_t>(others.size()));
}

}  // namespace
}  // namespace reprise
