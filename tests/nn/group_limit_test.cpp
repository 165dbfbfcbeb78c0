// Routing within the best groups of experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/nn/moe.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using test::floats;
using test::normal;

TEST(GroupLimit, ScoresOutsideOfTheBestGroupsBecomeZero) {
  constexpr int kTokens = 20, kGroups = 4, kSize = 3;
  const mx::array scores = mx::abs(normal({kTokens, kGroups * kSize}, 7));
  const std::vector<float> all = floats(scores);
  for (const int members : {1, 2}) {
    for (const int kept : {1, 2, 4}) {
      const std::vector<float> got = floats(limit_to_groups(scores, {kGroups, kept, members}));
      for (int token = 0; token < kTokens; ++token) {
        const auto* row = all.data() + token * kGroups * kSize;
        std::vector<float> worth;
        for (int group = 0; group < kGroups; ++group) {
          std::vector<float> best(row + group * kSize, row + (group + 1) * kSize);
          std::sort(best.rbegin(), best.rend());
          worth.push_back(std::accumulate(best.begin(), best.begin() + members, 0.0f));
        }
        for (int group = 0; group < kGroups; ++group) {
          const auto better = std::count_if(
              worth.begin(), worth.end(), [&](float other) { return other > worth[static_cast<std::size_t>(group)]; });
          for (int i = group * kSize; i < (group + 1) * kSize; ++i) {
            EXPECT_EQ(got[static_cast<std::size_t>(token * kGroups * kSize + i)], better < kept ? row[i] : 0.0f);
          }
        }
      }
    }
  }
}

TEST(TopK, OrderChoosesAndScoresWeigh) {
  const mx::array scores({0.1f, 0.2f, 0.3f, 0.4f}, {1, 4});
  const mx::array order({9.0f, 1.0f, 8.0f, 2.0f}, {1, 4});
  const Routing routing = top_k(scores, order, 2, NormaliseScores::no);
  std::vector<float> experts = floats(routing.experts), weights = floats(routing.weights);
  if (experts[0] > experts[1]) {
    std::swap(experts[0], experts[1]);
    std::swap(weights[0], weights[1]);
  }
  EXPECT_EQ(experts, (std::vector<float>{0, 2}));
  EXPECT_EQ(weights, (std::vector<float>{0.1f, 0.3f}));
  const std::vector<float> normalised = floats(top_k(scores, order, 2, NormaliseScores::yes).weights);
  EXPECT_FLOAT_EQ(normalised[0] + normalised[1], 1.0f);
}

}  // namespace
}  // namespace reprise
