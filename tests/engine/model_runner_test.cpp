// A ModelRunner over every kind of cache, beside each sequence alone.
#include "reprise/engine/model_runner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "reprise/base/error.h"
#include "tests/engine/runner_run.h"
#include "tests/models/model_kit.h"

namespace reprise::test {
namespace {

const SamplingParams kGreedy;

// A folder that is gone afterwards.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "reprise_runner_XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

class KitRunner : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kit_folder() / GetParam())) GTEST_SKIP() << "no " << GetParam() << " in the kit";
    model = kit_model(GetParam());
  }
  Tokens tokens(int count) { return random_tokens(random, count, model->info().vocab_size); }

  // Products with quantised weights round what they multiply, each number of rows in its own way.
  double close() const { return model->info().quantization == "none" ? kClose : 10 * kClose; }

  std::unique_ptr<LanguageModel> model;
  std::mt19937 random{7};
};

TEST_P(KitRunner, AnswersAfterAnEditAsAColdRunDoes) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens base = tokens(290);
  SequenceId id = 1;
  EXPECT_LT(distance(converse(runner, id++, base), answer_alone(*model, base, 8)), close());
  for (int round = 0; round < 6; ++round) {
    const int kept = std::uniform_int_distribution<int>(1, 285)(random);
    Tokens edited(base.begin(), base.begin() + kept);
    const Tokens more = tokens(30);
    edited.insert(edited.end(), more.begin(), more.end());
    const Answer got = converse(runner, id++, edited);
    EXPECT_LT(distance(got, answer_alone(*model, edited, 8)), close()) << "edited at " << kept;
    EXPECT_GE(got.reused, runner.needs_checkpoints() ? kept - kCheckpointEvery : kept) << "edited at " << kept;
  }
  EXPECT_EQ(runner.prefix().stats().refused, 0u);
}

TEST_P(KitRunner, LeavesOneTokenOfAPromptThatItKnows) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens prompt = tokens(150);
  const Answer first = converse(runner, 1, prompt);
  const Answer again = converse(runner, 2, prompt);
  EXPECT_EQ(again.computed, 0);
  EXPECT_EQ(again.reused, 149);
  EXPECT_LT(distance(again, first), close());
}

TEST_P(KitRunner, GoesOnAfterItsOwnAnswer) {
  ModelRunner runner(*model, "m", small_blocks());
  Tokens prompt = tokens(100);
  const Answer first = converse(runner, 1, prompt, {.max_tokens = 90});
  prompt.insert(prompt.end(), first.tokens.begin(), first.tokens.end());
  const int known = static_cast<int>(prompt.size()) - 1;  // of the last token no row was needed
  const Tokens question = tokens(20);
  prompt.insert(prompt.end(), question.begin(), question.end());
  const Answer second = converse(runner, 2, prompt);
  EXPECT_GE(second.reused, known);
  EXPECT_LT(distance(second, answer_alone(*model, prompt, 8)), close());

  // Into the middle of what was decoded.
  Tokens edited(prompt.begin(), prompt.begin() + 170);
  edited.insert(edited.end(), question.begin(), question.end());
  const Answer third = converse(runner, 3, edited);
  EXPECT_GE(third.reused, runner.needs_checkpoints() ? 170 - kCheckpointEvery : 170);
  EXPECT_LT(distance(third, answer_alone(*model, edited, 8)), close());
}

TEST_P(KitRunner, AnswersWarmAfterARestart) {
  const Folder folder;
  ModelRunnerOptions options = small_blocks();
  options.prefix.disk = DiskTierOptions{.folder = folder.path};
  Tokens prompt = tokens(150);
  Answer first;
  {
    ModelRunner runner(*model, "m", options);
    first = converse(runner, 1, prompt, {.max_tokens = 40});
  }
  ModelRunner runner(*model, "m", options);
  const Answer again = converse(runner, 1, prompt, {.max_tokens = 40});
  EXPECT_EQ(again.reused, 149);
  EXPECT_LT(distance(again, first), close());
  EXPECT_EQ(runner.prefix().stats().disk_hit_tokens, 149u);
  EXPECT_EQ(ModelRunner(*model, "other", options).start({.id = 1, .tokens = prompt, .sampling = &kGreedy, .salt = {}}),
            0);

  ModelRunner third(*model, "m", options);
  prompt.insert(prompt.end(), first.tokens.begin(), first.tokens.end());
  prompt[120] = (prompt[120] + 1) % 50;
  const Answer edited = converse(third, 1, prompt);
  EXPECT_GE(edited.reused, third.needs_checkpoints() ? 120 - kCheckpointEvery : 120);
  EXPECT_LT(distance(edited, answer_alone(*model, prompt, 8)), close());
  EXPECT_EQ(third.prefix().stats().refused, 0u);
}

TEST_P(KitRunner, AnswersInABatchAsAlone) {
  ModelRunner runner(*model, "m", small_blocks());
  struct Row {
    Tokens prompt;
    int joins;  // before which step
    int length;
    Answer got = {};
  };
  std::map<SequenceId, Row> rows;
  rows[1] = {tokens(100), 0, 14};
  rows[2] = {tokens(7), 0, 5};
  rows[3] = {tokens(1), 2, 9};
  rows[4] = {tokens(230), 3, 6};
  rows[5] = {tokens(64), 3, 12};
  const Conversation how;
  for (int step = 0;; ++step) {
    std::vector<SequenceId> active;
    bool any_left = false;
    for (auto& [id, row] : rows) {
      if (row.joins == step) prefill_all(runner, id, row.prompt, how);
      const bool open = static_cast<int>(row.got.tokens.size()) < row.length;
      any_left = any_left || open;
      // Every third step asks for some of the rows only.
      if (open && row.joins <= step && (step % 3 != 2 || id % 2 == 1)) active.push_back(id);
    }
    if (!any_left) break;
    if (active.empty()) continue;
    for (const DecodedToken& decoded : runner.decode(active, step % 4 != 3)) {
      ASSERT_FALSE(decoded.error);
      Row& row = rows.at(decoded.id);
      row.got.tokens.push_back(decoded.token);
      row.got.logprobs.push_back(decoded.logprob);
      if (static_cast<int>(row.got.tokens.size()) == row.length) runner.finish(decoded.id);
    }
  }
  for (const auto& [id, row] : rows) {
    EXPECT_LT(distance(row.got, answer_alone(*model, row.prompt, row.length)), close()) << "row " << id;
  }
  // What each has left behind is right too.
  SequenceId id = 10;
  for (const auto& [unused, row] : rows) {
    Tokens longer = row.prompt;
    longer.insert(longer.end(), row.got.tokens.begin(), row.got.tokens.end());
    longer.push_back(3);
    EXPECT_LT(distance(converse(runner, id++, longer), answer_alone(*model, longer, 8)), close());
  }
  EXPECT_EQ(runner.prefix().stats().refused, 0u);
}

TEST_P(KitRunner, DrawsAsTheSameSeedDoesAlone) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens first = tokens(40);
  const Tokens second = tokens(25);
  const SamplingParams warm{.temperature = 0.8f, .top_p = 0.95f, .seed = 11};
  runner.start({.id = 1, .tokens = first, .sampling = &warm, .salt = {}});
  runner.prefill(1, 39, false);
  runner.start({.id = 2, .tokens = second, .sampling = &kGreedy, .salt = {}});
  runner.prefill(2, 24, false);
  std::map<SequenceId, Answer> got;
  const std::vector<SequenceId> ids = {2, 1};
  for (int step = 0; step < 10; ++step) {
    for (const DecodedToken& decoded : runner.decode(ids, true)) {
      ASSERT_FALSE(decoded.error);
      got[decoded.id].tokens.push_back(decoded.token);
      got[decoded.id].logprobs.push_back(decoded.logprob);
    }
  }
  EXPECT_LT(distance(got[1], answer_alone(*model, first, 10, warm)), close());
  EXPECT_LT(distance(got[2], answer_alone(*model, second, 10)), close());
}

TEST_P(KitRunner, KeepsWhatACancelledPromptComputed) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens prompt = tokens(200);
  runner.start({.id = 1, .tokens = prompt, .sampling = &kGreedy, .salt = {}});
  runner.prefill(1, 100, false);
  EXPECT_EQ(runner.finish(1), 100);
  const Answer again = converse(runner, 2, prompt);
  EXPECT_EQ(again.reused, 100);
  EXPECT_LT(distance(again, answer_alone(*model, prompt, 8)), close());
}

TEST_P(KitRunner, CountsWhatIsHeldToTheByte) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens prompt = tokens(130);
  converse(runner, 1, prompt);
  const PrefixTreeStats tree = runner.prefix().stats().tree;
  EXPECT_EQ(runner.nbytes(), tree.nbytes);
  EXPECT_EQ(tree.pinned_nbytes, 0u);
  // A checkpoint is one state, a live sequence has room for two; its pages are two for each layer.
  const std::size_t one_state = tree.checkpoints > 0 ? tree.checkpoint_nbytes / tree.checkpoints : 0;
  EXPECT_EQ(tree.checkpoint_nbytes, tree.checkpoints * one_state);
  EXPECT_EQ(2 * runner.bytes_of(64) - runner.bytes_of(192), 2 * one_state);
  if (!runner.needs_checkpoints()) {
    EXPECT_LE(runner.nbytes(), runner.bytes_of(140));
  }

  converse(runner, 2, tokens(90), {.keep = false});
  EXPECT_EQ(runner.nbytes(), tree.nbytes);

  const SequenceId id = 3;
  const Tokens other = tokens(70);
  prefill_all(runner, id, other, {.keep = false});
  for (int step = 0; step < 5; ++step) runner.decode(std::span(&id, 1), true);
  EXPECT_GT(runner.nbytes(), tree.nbytes);
  EXPECT_LE(runner.nbytes(), tree.nbytes + runner.bytes_of(76));
  runner.finish(id);
  EXPECT_EQ(runner.nbytes(), tree.nbytes);
  runner.prefix().tree().clear();
  EXPECT_EQ(runner.nbytes(), 0u);
}

TEST_P(KitRunner, SharesNothingBetweenSalts) {
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens prompt = tokens(100);
  converse(runner, 1, prompt, {.salt = "a"});
  EXPECT_EQ(runner.reusable("a", prompt), 99);
  EXPECT_EQ(runner.reusable("b", prompt), 0);
  EXPECT_EQ(converse(runner, 2, prompt, {.salt = "b"}).reused, 0);
}

TEST_P(KitRunner, StaysWithinItsBudget) {
  const std::size_t one = ModelRunner(*model, "m", small_blocks()).bytes_of(140);
  ModelRunner runner(*model, "m", small_blocks(3 * one));
  for (SequenceId id = 1; id < 8; ++id) {
    ASSERT_TRUE(runner.make_room(one));
    converse(runner, id, tokens(120));
    EXPECT_LE(runner.nbytes(), runner.max_bytes());
  }
  EXPECT_GT(runner.prefix().stats().tree.evicted_blocks, 0u);
}

TEST_P(KitRunner, FindsAColdRunEqual) {
  ModelRunnerOptions options = small_blocks();
  options.verify_reuse = 1.0;
  ModelRunner runner(*model, "m", options);
  Tokens prompt = tokens(120);
  converse(runner, 1, prompt);
  prompt[100] = (prompt[100] + 1) % 50;
  const Answer got = converse(runner, 2, prompt);
  EXPECT_LT(distance(got, answer_alone(*model, prompt, 8)), close());
  EXPECT_EQ(runner.reuse_checks(), 1u);
  EXPECT_EQ(runner.reuse_mismatches(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Kit, KitRunner,
                         testing::Values("llama", "llama_q4_g64", "gemma2", "gemma3_text", "llama_sliding", "cohere2",
                                         "llama4_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "mamba", "mamba2",
                                         "falcon_h1", "jamba", "lfm2", "nemotron_h", "qwen3_next", "recurrent_gemma"),
                         [](const auto& param) { return std::string(param.param); });

TEST(ModelRunner, RefusesWhatItCannotDo) {
  const auto model = kit_model("llama_sliding");
  ModelRunner runner(*model, "m", small_blocks());
  const Tokens prompt = {1, 2, 3};
  const SequenceId id = 1;
  EXPECT_THROW(runner.prefill(id, 1, false), Error);
  EXPECT_THROW(runner.decode(std::span(&id, 1), true), Error);
  runner.start({.id = id, .tokens = prompt, .sampling = &kGreedy, .salt = {}});
  EXPECT_THROW(runner.decode(std::span(&id, 1), true), Error) << "not prefilled";
  EXPECT_THROW(runner.prefill(id, 3, false), Error) << "the last token is decode's";
  EXPECT_EQ(runner.finish(id), 0);
  EXPECT_EQ(runner.finish(id), 0) << "twice";
  ModelRunnerOptions options = small_blocks();
  options.kv_quantization = KVQuantization{.group_size = 64, .bits = 8};
  EXPECT_THROW(ModelRunner(*model, "m", options), Error) << "heads of 16";
}

}  // namespace
}  // namespace reprise::test
