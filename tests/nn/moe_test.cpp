// Routing and the blocks of a mixture, against what they are by their formulas.
#include "reprise/nn/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "mlx/mlx.h"
#include "tests/nn/arrays.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using test::floats;
using test::normal;

// Weight by expert.
std::map<int, float> by_expert(const Routing& routing) {
  const auto experts = floats(routing.experts);
  const auto weights = floats(routing.weights);
  std::map<int, float> out;
  for (std::size_t i = 0; i < experts.size(); ++i) out[static_cast<int>(experts[i])] = weights[i];
  return out;
}

TEST(TopK, TheHighestScoresAreTakenAndDividedByTheirSumIfAsked) {
  const mx::array scores = mx::array({0.1f, 0.4f, 0.05f, 0.2f, 0.25f}, {1, 5});
  auto got = by_expert(top_k(scores, 2, NormaliseScores::no));
  ASSERT_EQ(got.size(), 2u);
  EXPECT_FLOAT_EQ(got.at(1), 0.4f);
  EXPECT_FLOAT_EQ(got.at(4), 0.25f);
  got = by_expert(top_k(scores, 2, NormaliseScores::yes));
  EXPECT_FLOAT_EQ(got.at(1), 0.4f / 0.65f);
  EXPECT_FLOAT_EQ(got.at(4), 0.25f / 0.65f);
  EXPECT_EQ(by_expert(top_k(scores, 5, NormaliseScores::no)).size(), 5u);
}

TEST(TopK, ASoftmaxOverTheChosenIsTheWholeOneNormalised) {
  const mx::array logits = normal({1, 7}, 3);
  const auto over_chosen = by_expert(softmax_of_top_k(logits, 3));
  const auto whole = by_expert(top_k_of_softmax(logits, 3, NormaliseScores::no));
  const auto normalised = by_expert(top_k_of_softmax(logits, 3, NormaliseScores::yes));
  const auto all = floats(mx::softmax(logits, -1));
  float sum = 0;
  for (const auto& [expert, weight] : whole) {
    EXPECT_FLOAT_EQ(weight, all[static_cast<std::size_t>(expert)]);
    sum += weight;
  }
  EXPECT_LT(sum, 0.999f);
  for (const auto& [expert, weight] : whole) {
    EXPECT_NEAR(over_chosen.at(expert), weight / sum, 1e-6);
    EXPECT_NEAR(normalised.at(expert), weight / sum, 1e-6);
  }
}

SwitchLinear maps(int experts, int out, int in, std::uint64_t seed, bool bias) {
  std::optional<mx::array> biases;
  if (bias) biases = normal({experts, out}, seed + 100);
  return SwitchLinear(normal({experts, out, in}, seed), biases);
}

TEST(SwitchGlu, ARoutingGivesTheWeightedSumOfWhatTheExpertsSay) {
  const SwitchGlu block{maps(4, 12, 8, 1, false), maps(4, 12, 8, 2, false), maps(4, 8, 12, 3, false)};
  const mx::array x = normal({2, 3, 8}, 4);
  const Routing routing = softmax_of_top_k(normal({2, 3, 4}, 5), 2);
  const mx::array each = block(x, routing.experts);
  EXPECT_EQ(each.shape(), (mx::Shape{2, 3, 2, 8}));
  EXPECT_TRUE(mx::allclose(block(x, routing), combine(each, routing.weights), 1e-4, 1e-5).item<bool>());
}

TEST(SwitchGlu, GptOssClipsItsGateAboveAndItsOtherPartOnBothSides) {
  const int E = 4;
  const auto one_by_one = [&](float factor) {
    return mx::reshape(mx::multiply(mx::eye(E), mx::array(factor)), {1, E, E});
  };
  const SwitchGlu block{SwitchLinear(one_by_one(1.0f)), SwitchLinear(one_by_one(-2.0f)), SwitchLinear(one_by_one(1.0f)),
                        ClippedSwiglu{1.702f, 7.0f}};
  const std::vector<float> x = {-9.0f, -1.0f, 2.0f, 11.0f};
  const auto got = floats(block(mx::array(x.data(), {1, E}), mx::array({0}, {1, 1}, mx::int32)));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float gate = std::min(x[i], 7.0f);
    const float up = std::clamp(-2.0f * x[i], -7.0f, 7.0f);
    EXPECT_NEAR(got[i], (up + 1.0f) * gate / (1.0f + std::exp(-1.702f * gate)), 1e-4) << x[i];
  }
}

}  // namespace
}  // namespace reprise
