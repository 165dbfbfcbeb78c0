#include "reprise/hub/listing.h"

#include <gtest/gtest.h>

#include "reprise/base/error.h"

namespace reprise::internal {
namespace {

const std::string kCommit(40, 'a');
const std::string kBlob(40, 'b');
const std::string kSha(64, 'c');

std::string listing(const std::string& siblings) {
  return R"({"sha":")" + kCommit + R"(","siblings":[)" + siblings + "]}";
}

std::string entry(const std::string& name, const std::string& rest = "") {
  return R"({"rfilename":")" + name + R"(","size":5,"blobId":")" + kBlob + "\"" + rest + "}";
}

std::vector<std::string> names(const std::vector<HubFile>& files) {
  std::vector<std::string> names;
  for (const HubFile& file : files) names.push_back(file.name);
  return names;
}

TEST(HubListing, LargeFilesHaveSha256AndOthersGitsId) {
  const auto files =
      parse_listing(listing(entry("config.json") + "," +
                            entry("model.safetensors", R"(,"lfs":{"sha256":")" + kSha + R"(","size":99})")))
          .files;
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].digest, kBlob);
  EXPECT_EQ(files[0].size, 5u);
  EXPECT_EQ(files[1].digest, kSha);
  EXPECT_EQ(files[1].size, 99u);
  EXPECT_EQ(files[1].digest_kind, BlobDigest::Kind::sha256);
}

TEST(HubListing, DamageIsRefused) {
  for (const std::string& text :
       {std::string("<html>"), std::string("[]"), std::string("{}"), R"({"sha":"../x","siblings":[]})" + std::string(),
        R"({"sha":")" + kCommit + R"("})", listing("5"), listing(R"({"rfilename":"a"})"), listing(entry("../a")),
        listing(entry("/etc/passwd")), listing(entry("a/../../b")), listing(entry("a//b")), listing(entry("a\\\\b")),
        listing(entry("")), listing(entry("a") + "," + entry("a")), listing(entry("a", R"(,"lfs":{})")),
        listing(entry("a", R"(,"lfs":{"sha256":"../../x","size":3})"))}) {
    EXPECT_THROW(parse_listing(text), Error) << text;
  }
}

TEST(HubListing, WithoutGlobsOneTakesWhatMlxLmTakes) {
  HubListing all{kCommit};
  for (const char* name : {"README.md", "config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin",
                           "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja", "modeling.py",
                           "original/consolidated.00.pth", "merges.txt"}) {
    all.files.push_back({name, 1, BlobDigest::Kind::git_blob, kBlob});
  }
  EXPECT_EQ(names(select_files(all, {})),
            (std::vector<std::string>{"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
                                      "tokenizer.json", "chat_template.jinja", "merges.txt"}));
  EXPECT_EQ(names(select_files(all, {"*.md", "orig*"})),
            (std::vector<std::string>{"README.md", "original/consolidated.00.pth"}));
  EXPECT_THROW(select_files(all, {"*.gguf"}), Error);
}

TEST(HubListing, OneGgufIsTakenAndSeveralAskForAChoice) {
  HubListing all{kCommit, {{"README.md", 1, BlobDigest::Kind::git_blob, kBlob}}};
  EXPECT_THROW(select_files(all, {}), Error);
  all.files.push_back({"a.gguf", 1, BlobDigest::Kind::git_blob, kBlob});
  EXPECT_EQ(names(select_files(all, {})), std::vector<std::string>{"a.gguf"});
  all.files.push_back({"b.gguf", 1, BlobDigest::Kind::git_blob, kBlob});
  try {
    select_files(all, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--include"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("b.gguf"), std::string::npos);
  }
}

TEST(BlobDigest, GitsIdIsWhatGitSays) {
  BlobDigest digest(BlobDigest::Kind::git_blob, 6);
  digest.update("hello\n", 6);
  EXPECT_EQ(digest.hex_digest(), "ce013625030ba8dba906f756967f9e9ca394464a");  // git hash-object
}

}  // namespace
}  // namespace reprise::internal
