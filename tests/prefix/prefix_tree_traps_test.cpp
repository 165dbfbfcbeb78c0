// Traps that such stores fall into: what went wrong elsewhere.
#include <gtest/gtest.h>

#include "tests/prefix/stored_for_tests.h"

namespace reprise {
namespace {

TEST(PrefixTreeTrap, AHitRefreshesSoThatTheOrderIsNotFirstInFirstOut) {
  PrefixTree tree(blocks_of(4, 8));
  tree.insert("", counting(4, 10), by_range());
  tree.insert("", counting(4, 20), by_range());
  EXPECT_EQ(tree.match("", counting(4, 10), false).length, 4);
  EXPECT_EQ(tree.insert("", counting(4, 30), by_range()), 4);
  EXPECT_EQ(tree.matched_length("", counting(4, 20), false), 0) << "the one that was not used stays";
  EXPECT_EQ(tree.matched_length("", counting(4, 10), false), 4) << "the one that was used went";
}

TEST(PrefixTreeTrap, APrefixOfOneTokenMatches) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", Tokens{7}, by_range());
  EXPECT_EQ(tree.match("", counting(5, 7), false).length, 1);
  tree.insert("", counting(9, 7), by_range());
  EXPECT_EQ(text_of(tree.match("", Tokens{7}, false)), "0-1:4");
}

TEST(PrefixTreeTrap, NoPrefixOfAnEntryStaysBesideIt) {
  for (int length = 1; length <= 9; ++length) {
    PrefixTree tree(blocks_of(4));
    for (int shorter = 0; shorter < length; ++shorter) tree.insert("", counting(shorter), by_range());
    tree.insert("", counting(length), by_range());
    EXPECT_EQ(tree.stats().tokens, static_cast<std::size_t>(length));
    EXPECT_EQ(tree.stats().blocks, static_cast<std::size_t>((length + 3) / 4));
    EXPECT_EQ(tree.matched_length("", counting(length), false), length) << "an entry went with its prefixes";
  }
}

TEST(PrefixTreeTrap, BytesAreTheSumOfTheEntriesAfterEachChange) {
  PrefixTree tree(blocks_of(4, 60));
  const auto sum = [&] {
    std::size_t nbytes = 0;
    tree.for_each([&](const PrefixTree::NodeView& view) { nbytes += view.nbytes; });
    return nbytes;
  };
  for (int i = 0; i < 40; ++i) {
    tree.insert("", counting(1 + i % 7, i % 5), by_range(1 + i % 3));
    ASSERT_EQ(tree.stats().nbytes, sum());
    tree.insert_checkpoint("", counting(1 + i % 4, i % 5), numbered(i, static_cast<std::size_t>(i % 11)));
    ASSERT_EQ(tree.stats().nbytes, sum());
    if (i % 6 == 0) tree.evict_one();
    ASSERT_EQ(tree.stats().nbytes, sum());
  }
  tree.clear();
  EXPECT_EQ(tree.stats().nbytes, 0U);
  EXPECT_EQ(tree.stats().checkpoint_nbytes, 0U);
}

TEST(PrefixTreeTrap, TheLimitHoldsAfterEveryInsertOnEveryPath) {
  PrefixTree tree(blocks_of(4, 10));
  EXPECT_EQ(tree.insert("", counting(40), by_range()), 8) << "as much of a long prompt as fits";
  EXPECT_LE(tree.stats().nbytes, 10U);
  EXPECT_TRUE(tree.insert_checkpoint("", counting(4), numbered(1, 6)));
  EXPECT_LE(tree.stats().nbytes, 10U) << "by a checkpoint";
  tree.insert("", counting(2, 50), by_range());
  tree.insert("", counting(4, 50), by_range(2));
  EXPECT_LE(tree.stats().nbytes, 10U) << "by a block that grew";
}

TEST(PrefixTreeTrap, WhatIsLargerThanTheLimitIsNotStoredAndEvictsNothing) {
  PrefixTree tree(blocks_of(4, 10));
  tree.insert("", counting(4), by_range());
  tree.insert("", counting(4, 50), by_range());
  EXPECT_EQ(tree.insert("", counting(4, 70), by_range(3)), 0);
  EXPECT_FALSE(tree.insert_checkpoint("", counting(4), numbered(1, 11)));
  EXPECT_EQ(tree.stats().nbytes, 8U);
  EXPECT_EQ(tree.stats().evicted_blocks, 0U);
}

TEST(PrefixTreeTrap, WhatFindsNoRoomBesideLeasesEvictsNothing) {
  PrefixTree tree(blocks_of(4, 12));
  std::shared_ptr<PrefixTree::Lease> lease;
  tree.insert("", counting(8), by_range(), &lease);
  tree.insert("", counting(4, 50), by_range());
  EXPECT_EQ(tree.insert("", counting(2, 70), by_range(3)), 0);
  EXPECT_EQ(tree.stats().evicted_blocks, 0U);
  EXPECT_EQ(tree.insert("", counting(2, 70), by_range(2)), 2);
  EXPECT_EQ(tree.matched_length("", counting(8), false), 8);
}

}  // namespace
}  // namespace reprise
