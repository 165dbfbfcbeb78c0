#include "reprise/prefix/prefix_tree.h"

#include <gtest/gtest.h>

#include "reprise/base/error.h"
#include "tests/prefix/stored_for_tests.h"

namespace reprise {
namespace {

using Lease = std::shared_ptr<PrefixTree::Lease>;

TEST(PrefixTree, AMatchUsesTheFirstTokensOfABlock) {
  PrefixTree tree(blocks_of(4));
  EXPECT_EQ(tree.insert("", counting(10), by_range()), 10);
  const auto match = tree.match("", Tokens{0, 1, 2, 3, 4, 5, 9, 9}, false);
  EXPECT_EQ(match.length, 6);
  EXPECT_EQ(text_of(match), "0-4:4 4-6:4008");
  EXPECT_EQ(text_of(tree.match("", counting(99), false)), "0-4:4 4-8:4008 8-10:8010");
  EXPECT_EQ(text_of(tree.match("", counting(8), false)), "0-4:4 4-8:4008");
}

TEST(PrefixTree, NothingIsStoredOrFoundUnderNoTokens) {
  PrefixTree tree(blocks_of(4));
  EXPECT_EQ(tree.insert("", {}, by_range()), 0);
  EXPECT_FALSE(tree.insert_checkpoint("", {}, numbered(1, 1)));
  tree.insert("", counting(4), by_range());
  const auto match = tree.match("", {}, false);
  EXPECT_EQ(match.length, 0);
  EXPECT_EQ(match.lease, nullptr);
  EXPECT_EQ(tree.match("", Tokens{7}, false).lease, nullptr);
  EXPECT_EQ(tree.pin("", Tokens{7}), 0);
  EXPECT_FALSE(tree.unpin("", Tokens{7}));
}

TEST(PrefixTree, SpacesNeverMeet) {
  PrefixTree tree(blocks_of(2));
  tree.insert("a", counting(4), by_range());
  EXPECT_EQ(tree.matched_length("b", counting(4), false), 0);
  EXPECT_FALSE(tree.insert_checkpoint("b", counting(4), numbered(1, 1)));
  tree.insert("b", counting(2), by_range());
  EXPECT_EQ(tree.matched_length("a", counting(4), false), 4);
  EXPECT_EQ(tree.clear("a"), 4U);
  EXPECT_EQ(tree.matched_length("a", counting(4), false), 0);
  EXPECT_EQ(tree.matched_length("b", counting(4), false), 2);
}

TEST(PrefixTree, OnlyMissingBlocksAreMade) {
  PrefixTree tree(blocks_of(2));
  tree.insert("", counting(4), by_range());
  std::vector<int> made;
  tree.insert("", counting(8), [&](int begin, int end) {
    made.push_back(begin);
    return by_range()(begin, end);
  });
  EXPECT_EQ(made, (std::vector{4, 6}));
}

TEST(PrefixTree, AShortBlockGivesWayToALongerOneWithAllThatItHas) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(6), by_range());
  EXPECT_TRUE(tree.insert_checkpoint("", counting(6), numbered(66, 5)));
  const auto match = tree.match("", counting(6), false);
  EXPECT_EQ(tree.pin("", counting(6)), 6);
  EXPECT_EQ(tree.insert("", counting(9), by_range()), 9);
  EXPECT_EQ(tree.stats().blocks, 3U);
  EXPECT_EQ(tree.stats().tokens, 9U);
  EXPECT_EQ(tree.stats().nbytes, 14U);
  EXPECT_EQ(tree.stats().pinned_nbytes, 13U);
  EXPECT_EQ(text_of(match), "0-4:4 4-6:4006") << "what was handed out changed";
  EXPECT_EQ(number_of(tree.match("", counting(7), true).checkpoint), 66);
  EXPECT_EQ(text_of(tree.match("", counting(9), false)), "0-4:4 4-8:4008 8-9:8009");
  EXPECT_TRUE(tree.unpin("", counting(6)));
}

TEST(PrefixTree, AShortBlockThatAnotherBeginsWithIsNotStored) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(8), by_range());
  EXPECT_EQ(tree.insert("", counting(6),
                        [](int, int) -> StoredRef {
                          ADD_FAILURE() << "made";
                          return nullptr;
                        }),
            6);
  EXPECT_EQ(tree.stats().blocks, 2U);
}

TEST(PrefixTree, BlocksThatPartWaysStandBesideEachOther) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", Tokens{1, 2, 3, 4}, by_range());
  tree.insert("", Tokens{1, 2, 9}, by_range());
  tree.insert("", Tokens{1, 2, 5, 5, 5}, by_range());
  EXPECT_EQ(tree.stats().blocks, 4U);
  EXPECT_EQ(tree.matched_length("", Tokens{1, 2, 3, 9}, false), 3);
  EXPECT_EQ(tree.matched_length("", Tokens{1, 2, 9, 9}, false), 3);
  EXPECT_EQ(tree.matched_length("", Tokens{1, 2, 5, 5, 5, 5}, false), 5);
  EXPECT_EQ(tree.matched_length("", Tokens{1, 2, 7}, false), 2);
}

TEST(PrefixTree, ANullContentEndsWhatIsStored) {
  PrefixTree tree(blocks_of(2));
  const auto three = [](int begin, int end) { return begin < 4 ? by_range()(begin, end) : nullptr; };
  Lease lease;
  EXPECT_EQ(tree.insert("", counting(8), three, &lease), 4);
  EXPECT_EQ(tree.stats().pinned_nbytes, 4U);
  EXPECT_EQ(tree.insert("", counting(1, 50), [](int, int) { return nullptr; }), 0);
}

TEST(PrefixTree, WhatMakeThrowsLeavesTheBlocksBeforeIt) {
  PrefixTree tree(blocks_of(2));
  Lease lease = tree.match("", counting(2), false).lease;
  const auto failing = [](int begin, int end) {
    if (begin == 4) throw std::runtime_error("no rows");
    return by_range()(begin, end);
  };
  EXPECT_THROW(tree.insert("", counting(8), failing, &lease), std::runtime_error);
  EXPECT_EQ(lease, nullptr);
  EXPECT_EQ(tree.matched_length("", counting(8), false), 4);
  EXPECT_EQ(tree.stats().pinned_nbytes, 0U);
  EXPECT_EQ(tree.insert("", counting(8), by_range()), 8);
}

TEST(PrefixTree, ALeaseMovesOnToTheEndOfWhatIsStored) {
  PrefixTree tree(blocks_of(2));
  tree.insert("", counting(2), by_range());
  Lease lease = tree.match("", counting(2), false).lease;
  EXPECT_EQ(tree.stats().pinned_nbytes, 2U);
  EXPECT_EQ(tree.insert("", counting(5), by_range(), &lease), 5);
  EXPECT_EQ(tree.stats().pinned_nbytes, 5U);
  EXPECT_EQ(tree.insert("", Tokens{9, 9, 9}, by_range(), &lease), 3);
  EXPECT_EQ(tree.stats().pinned_nbytes, 3U) << "the old path is still held";
  lease.reset();
  EXPECT_EQ(tree.stats().pinned_nbytes, 0U);
  EXPECT_EQ(tree.insert("", counting(5), by_range(), &lease), 5);
  EXPECT_EQ(tree.stats().pinned_nbytes, 5U) << "no lease came out of none";
}

TEST(PrefixTree, ALeaseMayOutliveTheTree) {
  Lease lease;
  PrefixTree::Match match;
  {
    PrefixTree tree(blocks_of(2));
    tree.insert("", counting(5), by_range(), &lease);
    match = tree.match("", counting(3), false);
  }
  EXPECT_EQ(text_of(match), "0-2:2 2-3:2004") << "contents live on with who asked";
  PrefixTree other(blocks_of(2));
  EXPECT_EQ(other.insert("", counting(3), by_range(), &lease), 3) << "a lease of another tree may move here";
  EXPECT_EQ(other.stats().pinned_nbytes, 3U);
  lease.reset();
  EXPECT_EQ(other.stats().pinned_nbytes, 0U);
}

TEST(PrefixTree, TheLongestCheckpointWhoseTokensAllMatchIsFound) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(10), by_range());
  for (const int position : {2, 4, 7, 8}) {
    EXPECT_TRUE(tree.insert_checkpoint("", counting(position), numbered(position, 1)));
  }
  const int wanted[] = {0, 0, 2, 2, 4, 4, 4, 7, 8, 8, 8};
  for (int length = 0; length <= 10; ++length) {
    const auto match = tree.match("", counting(length), true);
    EXPECT_EQ(match.length, wanted[length]) << length;
    EXPECT_EQ(number_of(match.checkpoint), wanted[length] == 0 ? -1 : wanted[length]);
    EXPECT_EQ(match.blocks.empty() ? 0 : match.blocks.back().end, wanted[length]);
    EXPECT_EQ(tree.matched_length("", counting(length), true), wanted[length]);
  }
}

TEST(PrefixTree, ACheckpointIsFoundFromASiblingThatBeginsAlike) {
  PrefixTree tree(blocks_of(8));
  tree.insert("", Tokens{1, 2, 3, 4}, by_range());
  EXPECT_TRUE(tree.insert_checkpoint("", Tokens{1, 2}, numbered(2, 1)));
  tree.insert("", Tokens{1, 2, 3, 9, 9}, by_range());
  EXPECT_TRUE(tree.insert_checkpoint("", Tokens{1, 2, 3, 9, 9}, numbered(5, 1)));
  const auto match = tree.match("", Tokens{1, 2, 3, 9}, true);
  EXPECT_EQ(match.length, 2);
  EXPECT_EQ(number_of(match.checkpoint), 2);
  EXPECT_EQ(text_of(match), "0-2:4") << "the block beside it might be evicted, and this one not leased";
}

TEST(PrefixTree, ACheckpointTakesThePlaceOfAnEarlierOne) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(4), by_range());
  tree.insert_checkpoint("", counting(3), numbered(1, 10));
  EXPECT_TRUE(tree.insert_checkpoint("", counting(3), numbered(2, 4)));
  EXPECT_EQ(tree.stats().checkpoints, 1U);
  EXPECT_EQ(tree.stats().checkpoint_nbytes, 4U);
  EXPECT_EQ(tree.stats().nbytes, 8U);
  EXPECT_EQ(number_of(tree.match("", counting(3), true).checkpoint), 2);
}

TEST(PrefixTree, ACheckpointNeedsTheBlocksOfItsTokens) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(6), by_range());
  EXPECT_FALSE(tree.insert_checkpoint("", counting(7), numbered(1, 1)));
  EXPECT_EQ(tree.stats().checkpoints, 0U);
  EXPECT_THROW(tree.insert_checkpoint("", counting(6), nullptr), Error);
}

TEST(PrefixTree, PinsCount) {
  PrefixTree tree(blocks_of(2));
  tree.insert("", counting(4), by_range());
  EXPECT_EQ(tree.pin("", counting(9)), 4);
  EXPECT_EQ(tree.pin("", counting(9)), 4);
  EXPECT_EQ(tree.stats().pinned_nbytes, 4U);
  EXPECT_FALSE(tree.unpin("", counting(4))) << "other tokens were pinned";
  EXPECT_TRUE(tree.unpin("", counting(9)));
  EXPECT_EQ(tree.evict_one(), std::nullopt);
  EXPECT_EQ(tree.clear(), 0U);
  EXPECT_TRUE(tree.unpin("", counting(9)));
  EXPECT_FALSE(tree.unpin("", counting(9)));
  EXPECT_EQ(tree.clear(), 4U);
}

TEST(PrefixTree, APinStaysOnWhatItWasPutOnWhateverComesBesideIt) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", Tokens{1, 2}, by_range());
  EXPECT_EQ(tree.pin("", Tokens{1, 2}), 2);
  tree.insert("", Tokens{1, 2, 8}, by_range());
  tree.insert("", Tokens{1, 2, 3}, by_range());  // nearer to what was pinned
  EXPECT_EQ(tree.clear(), 3U);
  EXPECT_EQ(tree.matched_length("", Tokens{1, 2, 8}, false), 3);
  EXPECT_TRUE(tree.unpin("", Tokens{1, 2}));
  EXPECT_EQ(tree.stats().pinned_nbytes, 0U);
}

TEST(PrefixTree, WhatIsUnusedForTheTtlExpires) {
  StillClock clock;
  PrefixTreeOptions options = blocks_of(2);
  options.ttl = std::chrono::milliseconds(100);
  PrefixTree tree(options, clock);
  tree.insert("", counting(4), by_range());
  tree.insert("", counting(2, 50), by_range());
  tree.insert("", counting(2, 70), by_range());
  tree.pin("", counting(2, 70));
  const Lease lease = tree.match("", counting(2, 50), false).lease;
  clock.time += std::chrono::milliseconds(99);
  EXPECT_EQ(tree.expire(), 0U);
  tree.match("", counting(2), false);
  clock.time += std::chrono::milliseconds(1);
  EXPECT_EQ(tree.expire(), 2U) << "only the second block of the first path";
  EXPECT_EQ(tree.stats().expired_blocks, 1U);
  EXPECT_EQ(tree.stats().evicted_blocks, 0U);
  EXPECT_EQ(tree.matched_length("", counting(4), false), 2);
  clock.time += std::chrono::hours(1);
  EXPECT_EQ(tree.expire(), 2U);
  EXPECT_EQ(tree.stats().nbytes, 4U) << "what is pinned or leased";
}

TEST(PrefixTree, EvictionTakesTheCheckpointsOfALeafBeforeItsLastOne) {
  PrefixTree tree(blocks_of(4));
  tree.insert("", counting(4), by_range());
  tree.insert_checkpoint("", counting(3), numbered(3, 30));
  tree.insert_checkpoint("", counting(1), numbered(1, 10));
  tree.insert_checkpoint("", counting(4), numbered(4, 40));
  EXPECT_EQ(tree.evict_one(), 10U);
  EXPECT_EQ(tree.evict_one(), 30U);
  EXPECT_EQ(tree.matched_length("", counting(4), true), 4);
  EXPECT_EQ(tree.evict_one(), 44U);
  EXPECT_EQ(tree.evict_one(), std::nullopt);
  EXPECT_EQ(tree.stats().evicted_checkpoints, 3U);
  EXPECT_EQ(tree.stats().evicted_blocks, 1U);
}

TEST(PrefixTree, AChainGoesFromItsEnd) {
  PrefixTree tree(blocks_of(1));
  tree.insert("", counting(5), by_range());
  for (int left = 4; left >= 0; --left) {
    EXPECT_EQ(tree.evict_one(), 1U);
    EXPECT_EQ(tree.matched_length("", counting(5), false), left);
  }
}

TEST(PrefixTree, MakeMayEvict) {
  PrefixTree tree(blocks_of(2));
  tree.insert("", counting(2), by_range());
  tree.insert("", counting(2, 50), by_range());
  const auto evicting = [&](int begin, int end) {
    while (tree.evict_one()) {
    }
    return by_range()(begin, end);
  };
  EXPECT_EQ(tree.insert("", counting(4), evicting), 4) << "the path that is being stored was evicted";
  EXPECT_EQ(tree.matched_length("", counting(2, 50), false), 0);
}

TEST(PrefixTree, AMillionBlocksOfOneTokenDoNotRecurse) {
  PrefixTree tree(blocks_of(1));
  const Tokens tokens = counting(1'000'000);
  const StoredRef content = numbered(0, 1);
  Lease lease;
  EXPECT_EQ(tree.insert(
                "", tokens, [&](int, int) { return content; }, &lease),
            1'000'000);
  EXPECT_EQ(tree.match("", tokens, false).blocks.size(), tokens.size());
  EXPECT_EQ(tree.pin("", tokens), 1'000'000);
  std::size_t seen = 0;
  tree.for_each([&](const PrefixTree::NodeView&) { ++seen; });
  EXPECT_EQ(seen, tokens.size());
  EXPECT_TRUE(tree.unpin("", tokens));
  lease.reset();
  EXPECT_EQ(tree.evict_one(), 1U);
  const Tokens half(tokens.begin(), tokens.begin() + 500'000);
  EXPECT_EQ(tree.pin("", half), 500'000);
  EXPECT_EQ(tree.clear(), 499'999U);
}  // and the rest goes with the tree

TEST(PrefixTree, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_THROW(PrefixTree(blocks_of(0)), Error);
  PrefixTreeOptions options;
  options.ttl = std::chrono::milliseconds(-1);
  EXPECT_THROW(PrefixTree{options}, Error);
}

TEST(PrefixTree, ViewsSayWhatANodeIs) {
  PrefixTree tree(blocks_of(2));
  tree.insert("salt", counting(3), by_range());
  tree.insert_checkpoint("salt", counting(3), numbered(1, 7));
  tree.pin("salt", counting(2));
  const auto match = tree.match("salt", counting(3), false);
  std::vector<PrefixTree::NodeView> views;
  tree.for_each([&](const PrefixTree::NodeView& view) { views.push_back(view); });
  ASSERT_EQ(views.size(), 2U);
  EXPECT_EQ(*views[0].space, "salt");
  EXPECT_EQ(views[0].parent, 0U);
  EXPECT_EQ(views[1].parent, views[0].id);
  EXPECT_EQ(views[1].begin, 2);
  EXPECT_EQ(Tokens(views[1].tokens.begin(), views[1].tokens.end()), Tokens{2});
  EXPECT_EQ(views[1].nbytes, 8U);
  EXPECT_EQ(views[1].checkpoints, 1U);
  EXPECT_EQ(views[0].pins, 1);
  EXPECT_EQ(views[1].pins, 0);
  EXPECT_EQ(views[1].leases, 1);
  EXPECT_EQ(views[1].hits, 1U);
}

}  // namespace
}  // namespace reprise
