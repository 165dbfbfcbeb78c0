#include "reprise/cache/prompt_trie.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

namespace reprise {
namespace {

using Trie = PromptTrie<int>;

Tokens counting(std::size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

TEST(PromptTrie, T2AddReturnsTheReplacedValueAndGetFindsExactKeysOnly) {
  Trie trie;
  EXPECT_EQ(trie.add("m", Tokens{1, 2}, 10), std::nullopt);
  EXPECT_EQ(trie.add("m", Tokens{1, 2}, 11), 10);
  EXPECT_EQ(*trie.get("m", Tokens{1, 2}), 11);
  for (const Tokens& other : {Tokens{}, {1}, {1, 2, 3}, {2}}) EXPECT_EQ(trie.get("m", other), nullptr);
  EXPECT_EQ(trie.get("n", Tokens{1, 2}), nullptr);
}

TEST(PromptTrie, T2ModelsDoNotMix) {
  Trie trie;
  trie.add("a", Tokens{1, 2}, 10);
  trie.add("b", Tokens{1, 2, 3}, 20);
  EXPECT_EQ(trie.search("a", Tokens{1, 2, 3}).shorter, (Tokens{1, 2}));
  EXPECT_EQ(trie.search("b", Tokens{1, 2}).longer, (Tokens{1, 2, 3}));
  EXPECT_EQ(trie.search("c", Tokens{1, 2}).common_prefix, 0u);
  EXPECT_EQ(trie.pop("b", Tokens{1, 2}), std::nullopt);
  EXPECT_EQ(trie.pop("c", Tokens{1, 2}), std::nullopt);
}

TEST(PromptTrie, T2AOneTokenPrefixCounts) {
  Trie trie;
  trie.add("m", Tokens{7}, 1);
  const PromptTrieResult found = trie.search("m", Tokens{7, 8, 9});
  EXPECT_EQ(found.shorter, Tokens{7});
  EXPECT_EQ(found.common_prefix, 1u);
  EXPECT_EQ(trie.search("m", Tokens{7}).exact, Tokens{7});
}

TEST(PromptTrie, T2TheEmptyKeyIsLegalAndSurvives) {
  Trie trie;
  trie.add("m", Tokens{}, 1);
  EXPECT_EQ(*trie.get("m", Tokens{}), 1);
  EXPECT_TRUE(trie.pop_prefixes("m", Tokens{}).empty());
  EXPECT_EQ(trie.search("m", Tokens{}).exact, Tokens{});
  EXPECT_EQ(trie.search("m", Tokens{3}).shorter, Tokens{});
  EXPECT_EQ(trie.search("m", Tokens{3}).longer, std::nullopt);
  trie.add("m", Tokens{3, 4}, 2);
  EXPECT_EQ(trie.pop("m", Tokens{3, 4}), 2);
  EXPECT_EQ(*trie.get("m", Tokens{}), 1);
  EXPECT_EQ(trie.pop("m", Tokens{}), 1);
  EXPECT_EQ(trie.num_nodes(), 0u);
}

TEST(PromptTrie, T2LongerIsTheShortestThatGoesOn) {
  Trie trie;
  trie.add("m", Tokens{1, 2, 3, 4, 5}, 1);
  trie.add("m", Tokens{1, 2, 9, 9}, 2);
  trie.add("m", Tokens{1, 2, 3, 4, 5, 6}, 3);
  const PromptTrieResult found = trie.search("m", Tokens{1, 2, 7});
  EXPECT_EQ(found.exact, std::nullopt);
  EXPECT_EQ(found.shorter, std::nullopt);
  EXPECT_EQ(found.longer, (Tokens{1, 2, 9, 9}));
  EXPECT_EQ(found.common_prefix, 2u);
  EXPECT_EQ(trie.search("m", Tokens{1, 2, 3}).longer, (Tokens{1, 2, 3, 4, 5}));
  EXPECT_EQ(trie.search("m", Tokens{8}).longer, std::nullopt);
}

TEST(PromptTrie, T2PopRemovesDeadBranchesAndNothingElse) {
  Trie trie;
  trie.add("m", Tokens{1, 2}, 1);
  trie.add("m", Tokens{1, 2, 3, 4, 5}, 2);
  trie.add("m", Tokens{1, 2, 8}, 3);
  EXPECT_EQ(trie.num_nodes(), 7u);
  EXPECT_EQ(trie.pop("m", Tokens{1, 2, 3, 4, 5}), 2);
  EXPECT_EQ(trie.num_nodes(), 4u);
  EXPECT_EQ(trie.pop("m", Tokens{1, 2}), 1);  // on the way to another
  EXPECT_EQ(trie.num_nodes(), 4u);
  EXPECT_EQ(trie.pop("m", Tokens{1, 2}), std::nullopt);
  EXPECT_EQ(trie.pop("m", Tokens{1, 2, 8}), 3);
  EXPECT_EQ(trie.num_nodes(), 0u);
}

TEST(PromptTrie, T2PopPrefixesTakesProperPrefixesWithTheirLengths) {
  Trie trie;
  for (const int length : {0, 1, 3, 5, 6}) trie.add("m", counting(static_cast<std::size_t>(length)), length);
  trie.add("m", Tokens{0, 9}, 100);
  using Popped = std::vector<std::pair<std::size_t, int>>;
  EXPECT_EQ(trie.pop_prefixes("m", counting(5), 3), (Popped{{3, 3}}));
  EXPECT_EQ(trie.pop_prefixes("m", counting(5)), (Popped{{0, 0}, {1, 1}}));
  EXPECT_EQ(*trie.get("m", counting(5)), 5);
  EXPECT_EQ(*trie.get("m", counting(6)), 6);
  EXPECT_EQ(*trie.get("m", Tokens{0, 9}), 100);
  EXPECT_TRUE(trie.pop_prefixes("n", counting(5)).empty());
}

// The walk ends where the key leaves the trie; what it emptied must not stay as a branch without values.
TEST(PromptTrie, T2PopPrefixesOfAKeyThatIsNotStoredLeavesNoDeadBranch) {
  Trie trie;
  trie.add("m", Tokens{1, 2, 3}, 1);
  EXPECT_EQ(trie.pop_prefixes("m", Tokens{1, 2, 3, 4}).size(), 1u);
  EXPECT_EQ(trie.num_nodes(), 0u);
}

// Also the depth of the branch when the trie goes away: a hundred thousand destructors deep would overflow the stack.
TEST(PromptTrie, T2KeysOfAHundredThousandTokensWork) {
  const Tokens tokens = counting(100'000);
  Trie trie;
  for (const std::size_t length : {255u, 256u, 257u, 100'000u}) trie.add("m", std::span(tokens).first(length), 1);
  EXPECT_EQ(trie.search("m", std::span(tokens).first(300)).shorter->size(), 257u);
  EXPECT_EQ(trie.search("m", std::span(tokens).first(300)).longer->size(), 100'000u);
  EXPECT_EQ(trie.search("m", std::span(tokens).first(256)).exact->size(), 256u);
  const Trie moved = std::move(trie);
  EXPECT_EQ(moved.num_nodes(), 100'001u);
}

// The plainest store that answers the same.
class NaiveTrie {
 public:
  std::map<Tokens, int> values;

  PromptTrieResult search(const Tokens& tokens) const {
    if (values.contains(tokens)) return {tokens, std::nullopt, std::nullopt, 0};
    PromptTrieResult result;
    for (const auto& [key, value] : values) {
      const auto shared = static_cast<std::size_t>(
          std::mismatch(key.begin(), key.end(), tokens.begin(), tokens.end()).first - key.begin());
      result.common_prefix = std::max(result.common_prefix, shared);
      if (shared == key.size() && (!result.shorter || key.size() > result.shorter->size())) result.shorter = key;
    }
    if (result.common_prefix == 0) return result;
    for (const auto& [key, value] : values) {
      const bool begins =
          key.size() >= result.common_prefix &&
          std::equal(key.begin(), key.begin() + static_cast<std::ptrdiff_t>(result.common_prefix), tokens.begin());
      if (begins && (!result.longer || key.size() < result.longer->size())) result.longer = key;
    }
    return result;
  }
};

TEST(PromptTrie, T2RandomHistoriesAgreeWithAPlainMap) {
  std::mt19937 random(11);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Trie trie;
  NaiveTrie naive;
  for (int step = 0; step < 20'000; ++step) {
    Tokens tokens;
    for (int i = pick(0, 6); i > 0; --i) tokens.push_back(pick(0, 2));
    switch (pick(0, 5)) {
      case 0:
      case 1: {
        const auto old = naive.values.find(tokens);
        ASSERT_EQ(trie.add("m", tokens, step), old == naive.values.end() ? std::nullopt : std::optional(old->second));
        naive.values[tokens] = step;
        break;
      }
      case 2: {
        const auto old = naive.values.find(tokens);
        ASSERT_EQ(trie.pop("m", tokens), old == naive.values.end() ? std::nullopt : std::optional(old->second));
        naive.values.erase(tokens);
        break;
      }
      case 3: {
        const std::size_t at_least = static_cast<std::size_t>(pick(0, 3));
        std::vector<std::pair<std::size_t, int>> expected;
        for (std::size_t length = at_least; length < tokens.size(); ++length) {
          const Tokens prefix(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(length));
          const auto found = naive.values.find(prefix);
          if (found == naive.values.end()) continue;
          expected.emplace_back(length, found->second);
          naive.values.erase(found);
        }
        ASSERT_EQ(trie.pop_prefixes("m", tokens, at_least), expected);
        break;
      }
      default: {
        const PromptTrieResult got = trie.search("m", tokens), want = naive.search(tokens);
        ASSERT_EQ(got.exact, want.exact);
        ASSERT_EQ(got.shorter, want.shorter);
        ASSERT_EQ(got.longer, want.longer);
        ASSERT_EQ(got.common_prefix, want.common_prefix);
      }
    }
  }
  for (const auto& [key, value] : std::map(naive.values)) ASSERT_EQ(trie.pop("m", key), value);
  EXPECT_EQ(trie.num_nodes(), 0u);
}

}  // namespace
}  // namespace reprise
