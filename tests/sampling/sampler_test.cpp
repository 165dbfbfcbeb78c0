#include "reprise/sampling/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/sampling/filters.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

mx::array row(const std::vector<float>& values) {
  return mx::array(values.data(), {1, static_cast<int>(values.size())}, mx::float32);
}

// Log-probabilities of a distribution.
mx::array row_of(const std::vector<float>& probs) { return mx::log(row(probs)); }

std::vector<int> draw(Sampler& sampler, const mx::array& logprobs, int count) {
  std::vector<mx::array> drawn;
  for (int i = 0; i < count; ++i) drawn.push_back(sampler(logprobs));
  auto all = mx::concatenate(drawn, 0);
  mx::eval(all);
  return {all.data<int>(), all.data<int>() + all.size()};
}

// Ids of `draws` draws from one row, twenty rows a call.
std::map<int, int> counts(Sampler sampler, const mx::array& logprobs, int draws) {
  std::map<int, int> seen;
  for (const int id : draw(sampler, mx::repeat(logprobs, 20, 0), draws / 20)) ++seen[id];
  return seen;
}

// Pearson's statistic against `probs`; ids of probability 0 must not occur.
double chi_squared(const std::map<int, int>& seen, const std::vector<float>& probs, int draws) {
  double sum = 0;
  for (std::size_t id = 0; id < probs.size(); ++id) {
    const auto it = seen.find(static_cast<int>(id));
    const double observed = it == seen.end() ? 0 : it->second;
    const double expected = static_cast<double>(probs[id]) * draws;
    if (expected == 0) {
      EXPECT_EQ(observed, 0) << "id " << id << " has probability 0";
    } else {
      sum += (observed - expected) * (observed - expected) / expected;
    }
  }
  return sum;
}

std::vector<bool> kept(const mx::array& filtered) {
  auto above = mx::greater(filtered, mx::array(-kInfinity));
  mx::eval(above);
  return std::vector<bool>(above.data<bool>(), above.data<bool>() + above.size());
}

TEST(Sampler, TemperatureZeroTakesTheLikeliestOfEachRow) {
  const mx::array logprobs({-3.0f, -1.0f, -2.0f, -1.0f, -2.0f, -3.0f, -9.0f, -9.0f, -0.1f}, {3, 3});
  auto ids = make_sampler({})(logprobs);
  EXPECT_EQ(ids.dtype(), mx::int32);
  EXPECT_TRUE(mx::array_equal(ids, mx::array({1, 0, 2})).item<bool>());
}

TEST(Sampler, NothingIsEvaluatedByACall) {
  const auto logprobs = mx::log(row({0.5f, 0.25f, 0.25f}));
  SamplingParams params{.temperature = 1, .top_p = 0.9f, .top_k = 2, .min_p = 0.1f, .xtc_probability = 1, .seed = 1};
  const auto id = make_sampler(params)(logprobs);
  EXPECT_FALSE(id.is_available());
  EXPECT_FALSE(logprobs.is_available());
  EXPECT_FALSE(make_sampler({})(logprobs).is_available());
}

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<float> probs = {0.05f, 0.4f, 0.0f, 0.25f, 0.1f, 0.15f, 0.05f};
  const auto seen = counts(make_sampler({.temperature = 1, .seed = 11}), row_of(probs), 20000);
  EXPECT_LT(chi_squared(seen, probs, 20000), 20.5);  // 5 degrees of freedom, p = 0.001
}

TEST(Sampler, TemperatureFlattensAndSharpens) {
  const std::vector<float> probs = {0.6f, 0.3f, 0.1f};
  for (const float temperature : {0.5f, 2.0f}) {
    std::vector<float> expected;
    float sum = 0;
    for (const float p : probs) sum += expected.emplace_back(std::pow(p, 1 / temperature));
    for (float& p : expected) p /= sum;
    const auto seen = counts(make_sampler({.temperature = temperature, .seed = 5}), row_of(probs), 20000);
    EXPECT_LT(chi_squared(seen, expected, 20000), 13.8) << temperature;  // 2 degrees of freedom, p = 0.001
  }
}

TEST(Sampler, FiltersLookAtTheDistributionBeforeTemperature) {
  const auto logprobs = row_of({0.5f, 0.3f, 0.15f, 0.05f});
  // 0.15 / 0.5 is below min_p, whatever the temperature makes of it.
  const auto seen = counts(make_sampler({.temperature = 100, .min_p = 0.5f, .seed = 3}), logprobs, 4000);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_NEAR(seen.at(0), 2000, 200);
}

TEST(Sampler, SameSeedGivesTheSameDrawsAndAnotherSeedOthers) {
  const auto logprobs = mx::zeros({1, 1000});
  auto a = make_sampler({.temperature = 1, .seed = 42});
  auto b = make_sampler({.temperature = 1, .seed = 42});
  auto c = make_sampler({.temperature = 1, .seed = 43});
  const auto first = draw(a, logprobs, 50);
  EXPECT_EQ(first, draw(b, logprobs, 50));
  EXPECT_NE(first, draw(c, logprobs, 50));
}

TEST(Sampler, NoSeedGivesOtherDrawsEachTime) {
  const auto logprobs = mx::zeros({1, 100000});
  auto a = make_sampler({.temperature = 1});
  auto b = make_sampler({.temperature = 1});
  EXPECT_NE(draw(a, logprobs, 8), draw(b, logprobs, 8));
}

TEST(Sampler, GoesOnFromNumDrawsWithoutOtherState) {
  const auto logprobs = mx::zeros({1, 1000});
  const SamplingParams params{.temperature = 1, .xtc_probability = 0.5f, .seed = 9};
  auto whole = make_sampler(params);
  const auto all = draw(whole, logprobs, 30);
  auto other = make_sampler({.temperature = 1, .seed = 1});
  draw(other, logprobs, 7);
  auto rest = make_sampler(params, 12);
  EXPECT_EQ(std::vector<int>(all.begin() + 12, all.end()), draw(rest, logprobs, 18));
}

TEST(Sampler, RowsDrawIndependently) {
  auto sampler = make_sampler({.temperature = 1, .seed = 2});
  auto ids = sampler(mx::zeros({64, 100000}));
  mx::eval(ids);
  const std::map<int, int> different = [&] {
    std::map<int, int> seen;
    for (int i = 0; i < 64; ++i) ++seen[ids.data<int>()[i]];
    return seen;
  }();
  EXPECT_GT(different.size(), 60u);
}

TEST(Sampler, XtcActsAsOftenAsItsProbability) {
  const auto logprobs = row_of({0.5f, 0.4f, 0.1f});
  const auto seen = counts(make_sampler({.temperature = 1, .xtc_probability = 0.3f, .xtc_threshold = 0.2f, .seed = 8}),
                           logprobs, 20000);
  // With XTC only 0.4 and 0.1 are left: id 0 comes from the other 70 % alone.
  EXPECT_NEAR(seen.at(0), 0.7 * 0.5 * 20000, 300);
}

TEST(LogitsSampler, DrawsWhatTheSamplerDrawsFromLogSoftmax) {
  const auto logits = mx::multiply(mx::random::normal({6, 300}, mx::random::key(3)), mx::array(3.0f));
  const auto logprobs = mx::subtract(logits, mx::logsumexp(logits, -1, true));
  for (SamplingParams params :
       {SamplingParams{}, SamplingParams{.temperature = 1},
        SamplingParams{.temperature = 0.7f, .top_p = 0.8f, .top_k = 20},
        SamplingParams{.temperature = 2, .min_p = 0.02f, .min_tokens_to_keep = 4},
        SamplingParams{.temperature = 1, .xtc_probability = 0.5f, .xtc_threshold = 0.05f, .xtc_special_tokens = {7}}}) {
    params.seed = 21;
    auto sampler = make_sampler(params, 5);
    auto logits_sampler = make_logits_sampler(params, 5);
    for (int call = 0; call < 20; ++call) {
      const auto expected = sampler(logprobs);
      const auto sampled = logits_sampler(mx::reshape(logits, {2, 3, 300}));
      EXPECT_TRUE(mx::array_equal(sampled.tokens, expected).item<bool>());
      const auto logprob = mx::take_along_axis(logprobs, mx::reshape(expected, {6, 1}), -1);
      EXPECT_TRUE(mx::allclose(sampled.logprobs, mx::reshape(logprob, {6}), 0, 2e-5).item<bool>());
    }
  }
}

TEST(LogitsSampler, RefusesASpecialTokenOutsideTheVocabulary) {
  auto sampler = make_logits_sampler({.temperature = 1, .xtc_probability = 0.1f, .xtc_special_tokens = {4}});
  EXPECT_THROW(sampler(mx::zeros({1, 4})), Error);
  EXPECT_NO_THROW(sampler(mx::zeros({1, 5})));
}

TEST(Sampler, TinyTemperatureIsGreedyAndNotNaN) {
  for (const float temperature : {1e-3f, 1e-20f, 1e-40f}) {
    const auto seen = counts(make_sampler({.temperature = temperature, .seed = 1}), row({-20, -0.7f, -0.9f}), 20);
    EXPECT_EQ(seen, (std::map<int, int>{{1, 20}})) << temperature;
  }
}

TEST(Sampler, RowsWithoutAnyMassGiveAnIdInTheVocabulary) {
  const auto nothing = row({-kInfinity, -kInfinity, -kInfinity});
  const auto nan = row({std::nanf(""), std::nanf(""), std::nanf("")});
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams params{.temperature = temperature,
                          .top_p = 0.5f,
                          .top_k = 2,
                          .min_p = 0.1f,
                          .min_tokens_to_keep = 2,
                          .xtc_probability = 1,
                          .seed = 1};
    for (const auto& logprobs : {nothing, nan}) {
      const int id = make_sampler(params)(logprobs).item<int>();
      EXPECT_GE(id, 0);
      EXPECT_LT(id, 3);
    }
  }
}

TEST(Sampler, AVocabularyOfOneAlwaysGivesItsToken) {
  SamplingParams params{.temperature = 1,
                        .top_p = 0.5f,
                        .top_k = 5,
                        .min_p = 0.5f,
                        .min_tokens_to_keep = 9,
                        .xtc_probability = 1,
                        .xtc_threshold = 0.0f,
                        .seed = 1};
  EXPECT_EQ(counts(make_sampler(params), row({0}), 20), (std::map<int, int>{{0, 20}}));
}

TEST(Sampler, ForbiddenTokensAreNeverDrawn) {
  std::vector<float> values(5000, -kInfinity);
  values[0] = values[4999] = -kInfinity;
  values[2500] = values[2501] = std::log(0.5f);
  const auto seen = counts(make_sampler({.temperature = 1, .seed = 6}), row(values), 2000);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.contains(2500) && seen.contains(2501));
}

TEST(Sampler, AnotherRankIsRefused) {
  for (const float temperature : {0.0f, 1.0f}) {
    const auto sampler = make_sampler({.temperature = temperature});
    EXPECT_THROW(sampler(mx::zeros({5})), Error);
    EXPECT_THROW(sampler(mx::zeros({1, 0})), Error);
  }
}

TEST(ApplyTopK, KOfAtLeastTheVocabularyKeepsAll) {
  for (const int k : {0, 3, 4}) EXPECT_EQ(kept(apply_top_k(row({-1, -2, -3}), k)), std::vector<bool>(3, true)) << k;
}

TEST(ApplyTopP, ATinyMassKeepsTheLikeliest) {
  for (const float p : {1e-45f, 1e-10f}) {
    EXPECT_EQ(kept(apply_top_p(row_of({0.2f, 0.5f, 0.3f}), p)), (std::vector<bool>{false, true, false})) << p;
  }
}

TEST(ApplyMinP, MoreTokensToKeepThanThereAreKeepsAll) {
  EXPECT_EQ(kept(apply_min_p(row_of({0.2f, 0.5f, 0.3f}), 1.0f, 3)), std::vector<bool>(3, true));
}

TEST(ApplyXtc, ASpecialTokenOutsideTheVocabularyIsRefused) { EXPECT_THROW(apply_xtc(row({-1, -2}), 0.1f, {2}), Error); }

TEST(MakeLogitsProcessors, OnlyWhatIsOnIsMade) {
  EXPECT_TRUE(make_logits_processors({}).empty());
  EXPECT_TRUE(make_logits_processors({.repetition_penalty = 1.0f}).empty());
  EXPECT_TRUE(make_logits_processors({.repetition_penalty = 1.3f, .repetition_context_size = 0}).empty());
  const auto made = make_logits_processors({.repetition_penalty = 1.3f, .repetition_context_size = 5});
  ASSERT_EQ(made.size(), 1u);
  EXPECT_EQ(made[0].context_size, 5);
}

TEST(MakeLogitsProcessors, AnEmptyContextChangesNothing) {
  const auto logits = row({1, -2, 3});
  const mx::array empty(std::initializer_list<int>{}, mx::int32);
  const auto made = make_logits_processors({.repetition_penalty = 2, .presence_penalty = 1, .frequency_penalty = 1});
  ASSERT_EQ(made.size(), 3u);
  for (const auto& processor : made) EXPECT_TRUE(mx::array_equal(processor.apply(empty, logits), logits).item<bool>());
}

TEST(MakeLogitsProcessors, TheDtypeOfTheLogitsStays) {
  const auto made = make_logits_processors(
      {.repetition_penalty = 2, .presence_penalty = 1, .frequency_penalty = 1, .logit_bias = {{1, 0.5f}}});
  ASSERT_EQ(made.size(), 4u);
  for (const auto dtype : {mx::float16, mx::bfloat16}) {
    for (const auto& processor : made) {
      EXPECT_EQ(processor.apply(mx::array({0, 2}), mx::astype(row({1, 2, 3}), dtype)).dtype(), dtype);
    }
  }
}

TEST(MakeLogitsProcessors, ABiasOutsideTheVocabularyIsRefusedWhenApplied) {
  const auto made = make_logits_processors({.logit_bias = {{2, 1.0f}, {3, 1.0f}}});
  ASSERT_EQ(made.size(), 1u);
  try {
    made[0].apply(mx::array({0}), row({1, 2, 3}));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  }
}

TEST(MakeLogitsProcessors, ABiasOfMinusInfinityBansTheToken) {
  auto logits = make_logits_processors({.logit_bias = {{2, -kInfinity}}})[0].apply(mx::array({0}), row({1, 2, 9}));
  EXPECT_EQ(make_sampler({})(logits).item<int>(), 1);
}

}  // namespace
}  // namespace reprise
