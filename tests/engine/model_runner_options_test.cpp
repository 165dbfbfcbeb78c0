// A ModelRunner beside generate(), and with quantised rows.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "reprise/engine/model_runner.h"
#include "tests/engine/runner_run.h"
#include "tests/generate/reuse_checks.h"

namespace reprise::test {
namespace {

Tokens generated(const LoadedModel& model, const Tokens& prompt, int max_tokens, const SamplingParams& sampling) {
  RecordedCache cache{make_prompt_cache(*model.model), {}};
  return generate(model, prompt, cache, {.max_tokens = max_tokens, .sampling = sampling, .ignore_eos = true}).tokens;
}

TEST(ModelRunner, AnswersAsGenerateDoesWithEverySetting) {
  const LoadedModel model = with_kit_tokenizer(kit_model("llama"));
  std::vector<SamplingParams> settings(6);
  settings[1] = {.temperature = 0.9f, .seed = 5};
  settings[2] = {.repetition_penalty = 1.4f};
  settings[3] = {.temperature = 0.7f,
                 .top_p = 0.9f,
                 .presence_penalty = 0.8f,
                 .presence_context_size = 200,
                 .frequency_penalty = 0.4f,
                 .logit_bias = {{7, 3.0f}, {9, -4.0f}},
                 .seed = 6};
  settings[4] = {.temperature = 1.2f, .min_p = 0.05f, .xtc_probability = 0.5f, .xtc_threshold = 0.05f, .seed = 7};
  settings[5] = {.repetition_penalty = 1.3f, .repetition_context_size = 1};
  std::mt19937 random(1);
  std::vector<Tokens> prompts;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    prompts.push_back(random_tokens(random, 1 + 11 * static_cast<int>(i), 90));
  }
  for (const bool look_ahead : {false, true}) {
    ModelRunner runner(*model.model, "m", small_blocks());
    std::vector<SequenceId> ids;
    for (std::size_t i = 0; i < settings.size(); ++i) {
      ids.push_back(i);
      prefill_all(runner, i, prompts[i], {.sampling = settings[i]});
    }
    std::map<SequenceId, Tokens> got;
    for (int step = 0; step < 24; ++step) {
      for (const DecodedToken& decoded : runner.decode(ids, look_ahead)) {
        ASSERT_FALSE(decoded.error);
        got[decoded.id].push_back(decoded.token);
      }
    }
    for (std::size_t i = 0; i < settings.size(); ++i) {
      EXPECT_EQ(got[i], generated(model, prompts[i], 24, settings[i])) << "setting " << i;
      const Tokens alone = converse(runner, 100 + i, prompts[i], {.max_tokens = 24, .sampling = settings[i]}).tokens;
      EXPECT_EQ(alone, got[i]) << "setting " << i << " alone";
    }
  }
}

// As a scheduler sets a sequence aside.
TEST(ModelRunner, ASequenceThatStartsAgainDrawsOn) {
  const auto model = kit_model("llama");
  ModelRunner runner(*model, "m", small_blocks());
  std::mt19937 random(1);
  Tokens prompt = random_tokens(random, 50, 90);
  const SamplingParams sampling{.temperature = 1.0f, .seed = 3};
  const Answer want = answer_alone(*model, prompt, 12, sampling);
  SequenceId id = 1;
  prefill_all(runner, id, prompt, {.sampling = sampling});
  Answer got;
  for (int step = 0; step < 12; ++step) {
    if (step == 5) {
      runner.finish(id);
      id = 2;
      const int reused = runner.start({.id = id,
                                       .tokens = prompt,
                                       .sampling = &sampling,
                                       .num_draws = static_cast<std::uint64_t>(step),
                                       .salt = {}});
      EXPECT_EQ(reused, static_cast<int>(prompt.size()) - 1);
    }
    const auto decoded = runner.decode(std::span(&id, 1), true);
    ASSERT_FALSE(decoded.at(0).error);
    got.tokens.push_back(decoded[0].token);
    got.logprobs.push_back(decoded[0].logprob);
    if (step < 5) prompt.push_back(decoded[0].token);
  }
  EXPECT_LT(distance(got, want), kClose);
}

TEST(ModelRunner, ReusesQuantisedRows) {
  for (const char* name : {"llama", "llama4_text"}) {
    const auto model = kit_model(name);
    ModelRunnerOptions options = small_blocks();
    options.kv_quantization = KVQuantization{.group_size = 32, .bits = 8};
    options.verify_reuse = 1.0;
    ModelRunner runner(*model, "m", options);
    std::mt19937 random(4);
    Tokens prompt = random_tokens(random, 150, 90);
    const Answer first = converse(runner, 1, prompt);
    EXPECT_LT(runner.bytes_of(150), ModelRunner(*model, "m", small_blocks()).bytes_of(150) / 2);
    const Answer again = converse(runner, 2, prompt);
    EXPECT_EQ(again.reused, 149);
    EXPECT_LT(distance(again, first), kClose) << name;
    prompt[70] = (prompt[70] + 1) % 90;
    const Answer warm = converse(runner, 3, prompt);
    EXPECT_EQ(warm.reused, 70);
    ModelRunner fresh(*model, "m", options);
    EXPECT_LT(distance(warm, converse(fresh, 1, prompt)), 5e-2) << name;
    EXPECT_EQ(runner.reuse_checks(), 2u);
    EXPECT_EQ(runner.reuse_mismatches(), 0u);
  }
}

// Another model's rows under this one's name.
TEST(ModelRunner, AnswersFromAColdRunWhereWhatIsStoredIsWrong) {
  const auto model = kit_model("llama");
  ModelRunnerOptions options = small_blocks();
  options.verify_reuse = 1.0;
  ModelRunner runner(*model, "m", options);
  std::mt19937 random(4);
  const Tokens prompt = random_tokens(random, 100, 90);
  Tokens other = prompt;
  other[3] = (other[3] + 1) % 90;
  // Rows of `other` under the tokens of `prompt`.
  PromptCache cache = runner.prefix().form().fork();
  model->forward(mlx::core::array(other.data(), {1, 100}, mlx::core::int32), cache);
  cache.eval();
  runner.prefix().store("", prompt, cache, nullptr, {.checkpoint = true});
  const Answer got = converse(runner, 1, prompt);
  EXPECT_EQ(got.reused, 99);
  EXPECT_EQ(runner.reuse_mismatches(), 1u);
  EXPECT_LT(distance(got, answer_alone(*model, prompt, 8)), kClose);
}

TEST(ModelRunner, WhatIsStoredAndWrongIsReplacedAlsoOnDisk) {
  for (const char* name : {"llama", "falcon_h1"}) {
    std::string folder = std::filesystem::temp_directory_path() / "reprise_runner_XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    const auto model = kit_model(name);
    ModelRunnerOptions options = small_blocks();
    options.prefix.disk = DiskTierOptions{.folder = folder};
    options.verify_reuse = 1.0;
    std::mt19937 random(4);
    const Tokens prompt = random_tokens(random, 100, 90);
    const Answer want = answer_alone(*model, prompt, 8);
    {
      ModelRunner runner(*model, "m", options);
      Tokens other = prompt;
      for (const std::size_t i : {3u, 90u}) other[i] = (other[i] + 1) % 90;  // in the first block and in the last
      PromptCache cache = runner.prefix().form().fork();
      model->forward(mlx::core::array(other.data(), {1, 99}, mlx::core::int32), cache);
      cache.eval();
      runner.prefix().store("", std::span(prompt).first(99), cache, nullptr, {.checkpoint = true, .finished = true});
      runner.prefix().flush();
      EXPECT_EQ(converse(runner, 1, prompt).reused, 99) << name;
      EXPECT_EQ(runner.reuse_mismatches(), 1u) << name;
      const Answer again = converse(runner, 2, prompt);
      EXPECT_EQ(again.reused, 99) << name;
      EXPECT_LT(distance(again, want), kClose) << name;
      EXPECT_EQ(runner.reuse_mismatches(), 1u) << name << ": it was found once more";
    }
    {
      ModelRunner runner(*model, "m", options);
      const Answer from_disk = converse(runner, 1, prompt);
      EXPECT_EQ(from_disk.reused, 99) << name;
      EXPECT_LT(distance(from_disk, want), kClose) << name;
      EXPECT_EQ(runner.reuse_mismatches(), 0u) << name;
    }
    std::filesystem::remove_all(folder);
  }
}

}  // namespace
}  // namespace reprise::test
