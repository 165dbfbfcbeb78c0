// The engine beside generate, on real weights. Slow steps, so few of them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/engine/engine.h"
#include "reprise/generate/generate.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kTexts = {
    "Once upon a time",
    "The capital of France is",
    "A list of the planets of the solar system, the nearest to the sun first, with a sentence about each of them:",
    "def fibonacci(n):",
    "Water boils at",
};

struct EngineModelTest : testing::Test {
  static LoadedModel* model;
  static void SetUpTestSuite() {
    fs::path path = fs::path(REPRISE_SOURCE_DIR) / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (const char* given = std::getenv("REPRISE_MODEL")) path = given;
    if (fs::exists(path)) model = std::make_unique<LoadedModel>(load(path)).release();
  }
  static void TearDownTestSuite() { delete model; }
  void SetUp() override {
    if (model == nullptr) GTEST_SKIP() << "no small model: set REPRISE_MODEL or let ./run fetch it";
  }

  static GenerateResult alone(const std::string& text, int max_tokens, const SamplingParams& sampling = {}) {
    RecordedCache cache{make_prompt_cache(*model->model), {}};
    return generate(*model, model->tokenizer.encode(text), cache,
                    {.max_tokens = max_tokens, .sampling = sampling, .ignore_eos = true});
  }
  static Request request(const std::string& text, int max_tokens, const SamplingParams& sampling = {}) {
    return {
        .prompt = model->tokenizer.encode(text), .max_tokens = max_tokens, .sampling = sampling, .ignore_eos = true};
  }
};

LoadedModel* EngineModelTest::model = nullptr;

TEST_F(EngineModelTest, AnswersTogetherAreThoseThatGenerateGivesAlone) {
  Engine engine(*model);
  std::vector<Generation> generations;
  for (const std::string& text : kTexts) generations.push_back(engine.submit(request(text, 24)));
  for (std::size_t i = 0; i < kTexts.size(); ++i) {
    const GenerationResult together = generations[i].wait();
    const GenerateResult expected = alone(kTexts[i], 24);
    EXPECT_EQ(together.tokens, expected.tokens) << kTexts[i];
    EXPECT_EQ(together.text, expected.text);
    EXPECT_EQ(together.reason, expected.finish_reason);
  }
  EXPECT_EQ(engine.stats().scheduler.over_budget, 0u);
}

TEST_F(EngineModelTest, DrawnTokensDoNotDependOnWhoElseRuns) {
  Engine engine(*model);
  const SamplingParams sampling{.temperature = 0.8f, .top_p = 0.95f, .seed = 11};
  Generation other = engine.submit(request(kTexts[2], 30));
  Generation drawn = engine.submit(request(kTexts[0], 20, sampling));
  EXPECT_EQ(drawn.wait().tokens, alone(kTexts[0], 20, sampling).tokens);
}

TEST_F(EngineModelTest, APromptThatIsRepeatedIsNotComputedAgain) {
  Engine engine(*model);
  const GenerationResult first = engine.submit(request(kTexts[2], 8)).wait();
  const GenerationResult again = engine.submit(request(kTexts[2], 8)).wait();
  EXPECT_EQ(first.stats.cached_tokens, 0);
  EXPECT_EQ(again.stats.cached_tokens, again.stats.prompt_tokens - 1);
  EXPECT_EQ(again.tokens, first.tokens);
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.prefix.hit_tokens, static_cast<std::uint64_t>(again.stats.cached_tokens));
  EXPECT_GT(stats.nbytes, 0u);
  std::size_t blocks = 0;
  engine.with_prefix_cache([&](PrefixCache& prefix) { blocks = prefix.tree().stats().blocks; });
  EXPECT_GT(blocks, 0u);
}

TEST_F(EngineModelTest, ASmallBudgetSetsAsideAndAnswersTheSame) {
  std::size_t page = 0;  // of all layers
  {
    Engine engine(*model);
    engine.submit(request(kTexts[0], 1)).wait();
    page = engine.stats().nbytes;
  }
  // Two answers of three pages each.
  Engine engine(*model, {.scheduler = {.reserve_tokens = 8}, .max_bytes = 5 * page});
  Generation first = engine.submit(request(kTexts[0], 130));
  Generation second = engine.submit(request(kTexts[1], 130));
  EXPECT_EQ(first.wait().tokens, alone(kTexts[0], 130).tokens);
  EXPECT_EQ(second.wait().tokens, alone(kTexts[1], 130).tokens);
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.scheduler.over_budget, 0u);
  EXPECT_LE(stats.scheduler.max_nbytes_seen, 5 * page);
  EXPECT_GT(stats.scheduler.set_aside, 0u);
}

}  // namespace
}  // namespace reprise
