#include "reprise/storage/file_system.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <thread>

#include "tests/storage/test_files.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::read_text;
using testing::TemporaryFolder;
using testing::write_text;
using Names = std::vector<std::string>;

std::function<void(WritableFile&)> writes(const std::string& text) {
  return [text](WritableFile& file) { file.append(std::as_bytes(std::span(text))); };
}

mode_t mode_of(const fs::path& file) {
  struct stat status {};
  EXPECT_EQ(::stat(file.c_str(), &status), 0);
  return status.st_mode & 07777;
}

// The real file system, whose n-th operation (from 0) fails.
class FailingFileSystem final : public FileSystem {
 public:
  explicit FailingFileSystem(int failing) : left_(failing) {}

  bool failed() const { return left_ < 0; }
  const std::string& failed_operation() const { return failed_operation_; }

  std::pair<std::unique_ptr<WritableFile>, fs::path> create_temporary(const fs::path& target) override {
    step("create");
    auto [file, path] = real_file_system().create_temporary(target);
    return {std::make_unique<File>(*this, std::move(file)), path};
  }
  void rename(const fs::path& from, const fs::path& to) override {
    step("rename");
    real_file_system().rename(from, to);
  }
  void sync_folder(const fs::path& folder) override {
    step("sync_folder");
    real_file_system().sync_folder(folder);
  }
  void remove(const fs::path& file) noexcept override { real_file_system().remove(file); }

 private:
  class File final : public WritableFile {
   public:
    File(FailingFileSystem& owner, std::unique_ptr<WritableFile> file) : owner_(owner), file_(std::move(file)) {}
    void append(std::span<const std::byte> bytes) override {
      owner_.step("append");
      file_->append(bytes);
    }
    void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) override {
      owner_.step("overwrite");
      file_->overwrite(offset, bytes);
    }
    void sync() override {
      owner_.step("sync");
      file_->sync();
    }
    void close() override {
      owner_.step("close");
      file_->close();
    }

   private:
    FailingFileSystem& owner_;
    std::unique_ptr<WritableFile> file_;
  };

  void step(const char* operation) {
    if (left_-- != 0) return;
    failed_operation_ = operation;
    throw Error(ErrorCode::resource_exhausted, "[test] the disk is full");
  }

  int left_;
  std::string failed_operation_;
};

TEST(ReplaceFile, AFailureOfAnyOperationLeavesTheOldFileAndNoTemporary) {
  Names failed;
  for (int failing = 0;; ++failing) {
    TemporaryFolder folder;
    write_text(folder / "target", "old");
    FailingFileSystem file_system(failing);
    const auto error = testing::error_of([&] {
      replace_file(folder / "target",
                   [](WritableFile& file) {
                     writes("new ")(file);
                     writes("text")(file);
                   },
                   {.file_system = &file_system});
    });
    EXPECT_EQ(folder.names(), Names{"target"}) << failing;
    if (!file_system.failed()) {
      EXPECT_FALSE(error);
      EXPECT_EQ(read_text(folder / "target"), "new text");
      break;
    }
    failed.push_back(file_system.failed_operation());
    ASSERT_TRUE(error) << failed.back();
    EXPECT_EQ(error->code(), ErrorCode::resource_exhausted);
    if (failed.back() == "sync_folder") {  // the only step behind the rename
      EXPECT_EQ(read_text(folder / "target"), "new text");
      EXPECT_NE(std::string(error->what()).find("power cut"), std::string::npos) << error->what();
    } else {
      EXPECT_EQ(read_text(folder / "target"), "old") << failed.back();
    }
  }
  EXPECT_EQ(failed, (Names{"create", "append", "append", "sync", "close", "rename", "sync_folder"}));
}

TEST(ReplaceFile, AFailureWithoutAnOldFileLeavesNothing) {
  for (int failing = 0; failing < 5; ++failing) {
    TemporaryFolder folder;
    FailingFileSystem file_system(failing);
    EXPECT_TRUE(
        testing::error_of([&] { replace_file(folder / "target", writes("text"), {.file_system = &file_system}); }));
    EXPECT_EQ(folder.names(), Names{}) << failing;
  }
}

TEST(ReplaceFile, AnExceptionOfTheWriterLeavesTheOldFile) {
  TemporaryFolder folder;
  write_text(folder / "target", "old");
  EXPECT_THROW(replace_file(folder / "target",
                            [](WritableFile& file) {
                              writes("half")(file);
                              throw std::runtime_error("stop");
                            }),
               std::runtime_error);
  EXPECT_EQ(read_text(folder / "target"), "old");
  EXPECT_EQ(folder.names(), Names{"target"});
}

TEST(ReplaceFile, VerifySeesTheFinishedTemporaryAndMayRefuseIt) {
  TemporaryFolder folder;
  write_text(folder / "target", "old");
  std::string seen;
  const auto refuse = [&](const fs::path& temporary) {
    seen = read_text(temporary);
    EXPECT_EQ(temporary.parent_path(), folder.path());
    throw Error(ErrorCode::corrupt_data, "[test] refused");
  };
  expect_error(ErrorCode::corrupt_data, "refused",
               [&] { replace_file(folder / "target", writes("new"), {.verify = refuse}); });
  EXPECT_EQ(seen, "new");
  EXPECT_EQ(read_text(folder / "target"), "old");
  EXPECT_EQ(folder.names(), Names{"target"});
}

TEST(ReplaceFile, PermissionBitsOfAnExistingFileAreKept) {
  TemporaryFolder folder;
  write_text(folder / "target", "old");
  for (const mode_t mode : {0640u, 0604u, 0666u, 0755u}) {
    ASSERT_EQ(::chmod((folder / "target").c_str(), mode), 0);
    replace_file(folder / "target", writes("new"));
    EXPECT_EQ(mode_of(folder / "target"), mode);
  }
}

TEST(ReplaceFile, ANewFileGetsTheUmask) {
  TemporaryFolder folder;
  const mode_t before = ::umask(027);
  replace_file(folder / "private", writes("text"));
  ::umask(0);
  replace_file(folder / "public", writes("text"));
  ::umask(before);
  EXPECT_EQ(mode_of(folder / "private"), 0640u);
  EXPECT_EQ(mode_of(folder / "public"), 0666u);
}

TEST(ReplaceFile, ASymbolicLinkStaysAndItsTargetIsReplaced) {
  TemporaryFolder folder;
  fs::create_directory(folder / "elsewhere");
  write_text(folder / "elsewhere/real", "old");
  fs::create_symlink("elsewhere/real", folder / "link");
  fs::create_symlink("link", folder / "link_to_link");
  replace_file(folder / "link_to_link", writes("new"));
  EXPECT_TRUE(fs::is_symlink(folder / "link_to_link"));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "elsewhere/real"), "new");

  fs::create_symlink("elsewhere/missing", folder / "dangling");
  replace_file(folder / "dangling", writes("made"));
  EXPECT_EQ(read_text(folder / "elsewhere/missing"), "made");

  fs::create_symlink("circle", folder / "circle");
  expect_error(ErrorCode::invalid_argument, "links", [&] { replace_file(folder / "circle", writes("x")); });
}

TEST(ReplaceFile, AMissingFolderIsNotFoundAndNamed) {
  TemporaryFolder folder;
  expect_error(ErrorCode::not_found, "missing/target does not exist",
               [&] { replace_file(folder / "missing/target", writes("text")); });
}

TEST(ReplaceFile, AFolderOrADeviceIsNoTarget) {
  TemporaryFolder folder;
  fs::create_directory(folder / "target");
  expect_error(ErrorCode::invalid_argument, "folder", [&] { replace_file(folder / "target", writes("text")); });
  expect_error(ErrorCode::invalid_argument, "file name", [&] { replace_file(folder / "target/", writes("text")); });
  expect_error(ErrorCode::invalid_argument, "regular file", [&] { replace_file("/dev/null", writes("text")); });
  EXPECT_TRUE(fs::is_directory(folder / "target"));
}

TEST(ReplaceFile, AFullDiskIsResourceExhausted) {
  TemporaryFolder folder;
  write_text(folder / "target", "old");
  // A limit on file sizes fails a write as a full disk does.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto error = testing::error_of([&] { replace_file(folder / "target", writes(std::string(100'000, 'x'))); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::resource_exhausted) << error->what();
  EXPECT_EQ(read_text(folder / "target"), "old");
  EXPECT_EQ(folder.names(), Names{"target"});
}

TEST(ReplaceFile, TheLastOfSeveralWritersWinsWhole) {
  TemporaryFolder folder;
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&folder, i] {
      for (int round = 0; round < 10; ++round) {
        replace_file(folder / "target", writes(std::string(50'000, static_cast<char>('a' + i))));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string text = read_text(folder / "target");
  ASSERT_EQ(text.size(), 50'000u);
  EXPECT_EQ(text, std::string(50'000, text[0]));
  EXPECT_EQ(folder.names(), Names{"target"});
}

TEST(ReplaceFile, ALongNameLeavesRoomForTheTemporary) {
  TemporaryFolder folder;
  const std::string name(250, 'n');
  replace_file(folder / name, writes("text"));
  EXPECT_EQ(read_text(folder / name), "text");
}

TEST(ReadFile, GivesEveryByte) {
  TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 300'000; ++i) text += static_cast<char>(i % 251);
  write_text(folder / "file", text);
  EXPECT_EQ(read_file(folder / "file"), text);
  write_text(folder / "empty", "");
  EXPECT_EQ(read_file(folder / "empty"), "");
  EXPECT_FALSE(read_file("/proc/self/status").empty());  // a file whose size is given as 0
}

TEST(ReadFile, TellsAMissingFileFromAFolder) {
  TemporaryFolder folder;
  expect_error(ErrorCode::not_found, "nothing", [&] { read_file(folder / "nothing"); });
  expect_error(ErrorCode::invalid_argument, "folder", [&] { read_file(folder.path()); });
}

}  // namespace
}  // namespace reprise
