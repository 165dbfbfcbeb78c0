// A ModelRunner whose model fails: what the others and what is kept notice of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/engine/model_runner.h"
#include "tests/engine/runner_run.h"

namespace reprise::test {
namespace {

namespace mx = mlx::core;

const SamplingParams kGreedy;

// Forwards to a model, and fails where it is told to.
class FailingModel final : public LanguageModel {
 public:
  explicit FailingModel(const LanguageModel& model) : LanguageModel(model.info()), model_(model) {}
  mx::array forward(const mx::array& tokens, PromptCache& cache) const override {
    auto logits = model_.forward(tokens, cache);
    if (fails && fails(tokens)) throw std::runtime_error("told to fail");
    if (spoils && spoils(tokens)) logits = mx::multiply(logits, mx::array(std::nanf("")));
    return logits;
  }
  PromptCache make_cache() const override { return model_.make_cache(); }
  std::function<bool(mx::array)> fails;
  std::function<bool(const mx::array&)> spoils;

 private:
  const LanguageModel& model_;
};

class OneRowFails : public testing::TestWithParam<const char*> {};

TEST_P(OneRowFails, TheOthersGoOn) {
  const auto model = kit_model(GetParam());
  FailingModel failing(*model);
  ModelRunner runner(failing, "m", small_blocks());
  std::vector<Tokens> prompts;
  TokenId bad = 0;  // what the second is to be fed after its fourth token, and no other then
  for (unsigned seed = 1; prompts.empty(); ++seed) {
    std::mt19937 random(seed);
    prompts = {random_tokens(random, 30, 90), random_tokens(random, 5, 90), random_tokens(random, 61, 90)};
    const auto fourth = [&](std::size_t row) { return answer_alone(*model, prompts[row], 4).tokens.back(); };
    bad = fourth(1);
    if (bad == fourth(0) || bad == fourth(2)) prompts.clear();
  }
  for (SequenceId id = 0; id < 3; ++id) prefill_all(runner, id, prompts[id], {});
  std::vector<Answer> got(3);
  std::vector<SequenceId> ids = {0, 1, 2};
  for (int step = 0; step < 8; ++step) {
    if (step == 3) {
      failing.fails = [bad](mx::array tokens) {
        mx::eval(tokens);
        return std::count(tokens.data<int>(), tokens.data<int>() + tokens.size(), bad) > 0;
      };
    }
    std::vector<SequenceId> left;
    for (const DecodedToken& decoded : runner.decode(ids, true)) {
      if (decoded.error) {
        EXPECT_EQ(step, 4) << "the step that was begun before has its results";
        EXPECT_EQ(decoded.id, 1u);
        EXPECT_THROW(std::rethrow_exception(decoded.error), Error);
        runner.finish(decoded.id);
        failing.fails = {};
        continue;
      }
      left.push_back(decoded.id);
      got[decoded.id].tokens.push_back(decoded.token);
      got[decoded.id].logprobs.push_back(decoded.logprob);
    }
    ids = left;
  }
  EXPECT_EQ(got[1].tokens.size(), 4u);
  for (const std::size_t row : {0, 2}) {
    const Answer want = answer_alone(*model, prompts[row], 8);
    EXPECT_LT(distance(got[row], want), kClose)
        << row << ": " << testing::PrintToString(got[row].tokens) << " for " << testing::PrintToString(want.tokens);
  }
}

TEST_P(OneRowFails, APrefillThatFailsCanBeDoneAgain) {
  const auto model = kit_model(GetParam());
  FailingModel failing(*model);
  ModelRunner runner(failing, "m", small_blocks());
  std::mt19937 random(5);
  const Tokens prompt = random_tokens(random, 80, 90);
  runner.start({.id = 1, .tokens = prompt, .sampling = &kGreedy, .salt = {}});
  runner.prefill(1, 30, true);
  failing.fails = [](const mx::array&) { return true; };
  EXPECT_THROW(runner.prefill(1, 30, true), Error);
  failing.fails = {};
  EXPECT_EQ(runner.finish(1), 30);
  const Answer got = converse(runner, 2, prompt);
  EXPECT_EQ(got.reused, 30);
  EXPECT_LT(distance(got, answer_alone(*model, prompt, 8)), kClose);
}

TEST_P(OneRowFails, NumbersThatAreNoneAreToldAndNotKept) {
  const auto model = kit_model(GetParam());
  FailingModel failing(*model);
  ModelRunner runner(failing, "m", small_blocks());
  std::mt19937 random(5);
  const Tokens prompt = random_tokens(random, 80, 90);
  const SequenceId id = 1;
  prefill_all(runner, id, prompt, {});
  failing.spoils = [](const mx::array&) { return true; };
  const auto got = runner.decode(std::span(&id, 1), true);
  ASSERT_TRUE(got.at(0).error);
  try {
    std::rethrow_exception(got[0].error);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt_data);
  }
  runner.finish(id);
  failing.spoils = {};
  EXPECT_LT(distance(converse(runner, 2, prompt), answer_alone(*model, prompt, 8)), kClose);
}

INSTANTIATE_TEST_SUITE_P(Kit, OneRowFails, testing::Values("llama_sliding", "falcon_h1", "deepseek_v3"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace reprise::test
