#include "reprise/prefix/tiers/disk_keys.h"

#include <gtest/gtest.h>

#include <chrono>

#include "tests/storage/test_files.h"

namespace reprise::internal {
namespace {

TEST(KeyChain, HashesWhatStandsBehindWhatAsDocumented) {
  const Tokens tokens{1, 2, 3, 4, 5};
  KeyChain keys("space", tokens, 2);
  const EntryKey last = keys.block(4, 5);
  const EntryKey first = keys.block(0, 2);
  const EntryKey second = keys.block(2, 4);
  EXPECT_EQ(first.parent, space_hash("space"));
  EXPECT_EQ(first.tokens, std::string("\0\0\0\1\0\0\0\2", 8));
  EXPECT_EQ(second.parent, first.hash);
  EXPECT_EQ(last.parent, second.hash);
  EXPECT_EQ(last.hash, chained_hash(EntryKind::block, second.hash, last.tokens));
  const EntryKey checkpoint = keys.checkpoint();
  EXPECT_EQ(checkpoint.parent, second.hash);
  EXPECT_EQ(checkpoint.tokens, last.tokens);
  EXPECT_NE(checkpoint.hash, last.hash);
  for (const auto& [begin, end] : {std::pair{1, 2}, {0, 3}, {4, 6}, {2, 2}, {-2, 0}}) {
    testing::expect_error(ErrorCode::invalid_argument, "a block is", [&] { keys.block(begin, end); });
  }
}

// Hashed from the front for each block it would be 800 million hashes.
TEST(KeyChain, AsksForEachBlockOnce) {
  const Tokens tokens(40'000, 7);
  const auto start = std::chrono::steady_clock::now();
  KeyChain keys("space", tokens, 1);
  std::string parent = space_hash("space");
  for (int begin = 0; begin < 40'000; ++begin) {
    const EntryKey key = keys.block(begin, begin + 1);
    ASSERT_EQ(key.parent, parent);
    parent = key.hash;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace reprise::internal
