#include "reprise/generate/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

#include "reprise/base/error.h"

namespace reprise::internal {
namespace {

std::string run(const std::vector<std::string>& stop, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stop);
  std::string out;
  for (const auto& piece : pieces) out += matcher.add(piece);
  return out + matcher.finish();
}

TEST(StopMatcher, TextBeforeTheMatchComesOutAndNothingAfterIt) {
  EXPECT_EQ(run({"END"}, {"one EN", "D two"}), "one ");
  EXPECT_EQ(run({"END"}, {"E", "N", "D"}), "");
  EXPECT_EQ(run({"b", "abc"}, {"xabc"}), "xa") << "the one that is complete first";
  EXPECT_EQ(run({"b", "abc"}, {"xa", "b", "c"}), "xa");
  EXPECT_EQ(run({"bc", "abc"}, {"xabc"}), "x") << "of those complete at once, the longest";
  EXPECT_EQ(run({"aab"}, {"aa", "ab"}), "a");
}

TEST(StopMatcher, HeldBackTextComesOutWhenItWasNoStop) {
  EXPECT_EQ(run({"END"}, {"EN", "GINE"}), "ENGINE");
  EXPECT_EQ(run({"END"}, {"the EN"}), "the EN");
  EXPECT_EQ(run({}, {"a", "b"}), "ab");
}

TEST(StopMatcher, OnlyWhatMightBecomeAStopIsHeldBack) {
  StopMatcher matcher({"\n\nUser:"});
  EXPECT_EQ(matcher.add("Hello.\n"), "Hello.");
  EXPECT_EQ(matcher.add("More\n\nUs"), "\nMore");
  EXPECT_FALSE(matcher.matched());
  EXPECT_EQ(matcher.add("er: x"), "");
  EXPECT_TRUE(matcher.matched());
  EXPECT_EQ(matcher.add("later"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, EmptyStopStringIsRefused) { EXPECT_THROW(StopMatcher({"a", ""}), Error); }

TEST(StopMatcher, AnyCutIntoPiecesGivesWhatOnePieceGives) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += static_cast<char>('a' + random() % 2);
    const std::vector<std::string> stop = {"abba", "bbb"};
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = 1 + random() % 4;
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    EXPECT_EQ(run(stop, pieces), run(stop, {text})) << text;
    // Neither of these can lie within the other's reach, so the first to begin is the first to be complete.
    EXPECT_EQ(run(stop, pieces), text.substr(0, std::min(text.find("abba"), text.find("bbb")))) << text;
  }
}

}  // namespace
}  // namespace reprise::internal
