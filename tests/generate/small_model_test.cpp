// The whole road on real weights: a chat that remembers, across threads, forks and files. Slow steps, so few of them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/generate/chat_session.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
namespace fs = std::filesystem;

std::optional<fs::path> small_model() {
  if (const char* path = std::getenv("REPRISE_MODEL")) return path;
  const fs::path fetched = fs::path(REPRISE_SOURCE_DIR) / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (fs::exists(fetched)) return fetched;
  return {};
}

// Runs `work` on a thread of its own and hands its result, or its exception, back.
template <typename Work>
auto on_another_thread(Work work) {
  std::optional<decltype(work())> result;
  std::exception_ptr failure;
  std::thread([&] {
    try {
      result.emplace(work());
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return std::move(*result);
}

struct SmallModelTest : testing::Test {
  static LoadedModel* shared;
  static void SetUpTestSuite() {
    // Loaded on a thread that is gone when the tests use it [X9].
    if (const auto path = small_model())
      shared = on_another_thread([&] { return std::make_unique<LoadedModel>(load(*path)); }).release();
  }
  static void TearDownTestSuite() { delete shared; }
  void SetUp() override {
    if (shared == nullptr) GTEST_SKIP() << "no small model: set REPRISE_MODEL or let ./run fetch it";
    folder = fs::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::create_directories(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  mx::array last_logits(const Tokens& ids, PromptCache& cache) {
    auto logits = shared->model->forward(mx::array(ids.data(), {1, static_cast<int>(ids.size())}, mx::int32), cache);
    logits = mx::slice(logits, {0, logits.shape(1) - 1, 0}, {1, logits.shape(1), logits.shape(2)});
    mx::eval(logits);
    return logits;
  }

  fs::path folder;
};
LoadedModel* SmallModelTest::shared = nullptr;

TEST_F(SmallModelTest, TheSecondTurnReusesTheFirstAndEqualsAColdRun) {
  ChatSession session(*shared, {.generate = {.max_tokens = 8}});
  const auto first = session.say("My name is Ada.");
  const auto second = session.say("What is my name?");
  EXPECT_GE(second.stats.cached_tokens, first.stats.prompt_tokens + first.stats.completion_tokens - 1);

  const Tokens& record = session.cache().tokens;
  RecordedCache cold{shared->model->make_cache(), {}};
  const std::span<const TokenId> prompt(record.data(), static_cast<std::size_t>(second.stats.prompt_tokens));
  EXPECT_EQ(generate(*shared, prompt, cold, {.max_tokens = 8}).tokens, second.tokens);

  PromptCache warm = session.cache().cache.fork();
  trim_prompt_cache(warm, 1);
  PromptCache fresh = shared->model->make_cache();
  const auto got = last_logits({record.back()}, warm);
  const auto want = last_logits(record, fresh);
  // One row and many are multiplied by kernels of their own, and float16 rows may fall to the other side.
  EXPECT_LT(mx::max(mx::abs(mx::subtract(got, want))).item<float>() / mx::max(mx::abs(want)).item<float>(), 2e-3f);
}

TEST_F(SmallModelTest, X9LoadGenerateSaveAndRestoreOnFourThreads) {
  const ChatOptions options{.generate = {.max_tokens = 6}};
  ChatSession straight(*shared, options);
  straight.say("Name a colour.");
  const auto want = straight.say("Another one.");

  ChatSession session = on_another_thread([&] {
    ChatSession made(*shared, options);
    made.say("Name a colour.");
    return made;
  });
  const std::string path = on_another_thread([&] { return session.save(folder / "chat"); });
  const auto got = on_another_thread([&] {
    ChatSession restored(*shared, options);
    restored.load(path);
    return restored.say("Another one.");
  });
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.stats.cached_tokens, want.stats.cached_tokens);
}

TEST_F(SmallModelTest, UndoAndTheSameQuestionGiveTheSameAnswer) {
  ChatSession session(*shared, {.generate = {.max_tokens = 8}});
  const auto first = session.say("Count to three.");
  session.undo();
  const auto again = session.say("Count to three.");
  EXPECT_EQ(again.tokens, first.tokens);
  EXPECT_EQ(again.stats.cached_tokens, first.stats.prompt_tokens - 1);
}

// Some fifty tokens that differ with `n`.
std::string paragraph(int n) {
  std::string text = "Here is part " + std::to_string(n) + " of the list:";
  for (const char* word : {"apples", "rivers", "copper", "violins", "snow", "bridges", "salt", "pepper", "candles"}) {
    text += " " + std::to_string(n * 7 + static_cast<int>(text.size()) % 10) + " " + word + ",";
  }
  return text + " and more. Go on.";
}

TEST_F(SmallModelTest, G8AChatGoesOnPastThreeWindowsAndEqualsAColdRunOverTheSameRing) {
  const GenerateOptions options{.max_tokens = 5, .kv_cache = {.max_kv_size = 128}};
  ChatSession session(*shared, {.generate = options});
  GenerateResult last;
  for (int n = 0; session.cache().tokens.size() < 3 * 128 + 20; ++n) last = session.say(paragraph(n));
  EXPECT_EQ(session.cache().cache[0].class_name(), "RotatingKVCache");
  EXPECT_GT(last.stats.cached_tokens, 3 * 128 - 100);
  EXPECT_FALSE(last.text.empty());

  // Cold, in the same pieces, up to the last prompt's last token; then the same answer again.
  const RecordedCache& warm = session.cache();
  RecordedCache cold{make_prompt_cache(*shared->model, 128), {}};
  std::size_t pieces = 0;
  for (std::size_t at = 0; at + 1 < static_cast<std::size_t>(last.stats.prompt_tokens); ++pieces) {
    const auto size = static_cast<std::size_t>(warm.pieces[pieces]);
    const auto piece = std::span(warm.tokens).subspan(at, size);
    shared->model->forward(mx::array(piece.data(), {1, static_cast<int>(size)}, mx::int32), cold.cache);
    cold.cache.eval();
    cold.tokens.insert(cold.tokens.end(), piece.begin(), piece.end());
    at += size;
  }
  ASSERT_EQ(static_cast<int>(cold.tokens.size()), last.stats.prompt_tokens - 1);
  const TokenId last_of_prompt = warm.tokens[cold.tokens.size()];
  EXPECT_EQ(generate(*shared, std::span(&last_of_prompt, 1), cold, options).tokens, last.tokens);
  ASSERT_EQ(cold.tokens, warm.tokens);
  PromptCache a = warm.cache.fork();
  PromptCache b = cold.cache.fork();
  const auto got = last_logits({42}, a);
  const auto want = last_logits({42}, b);
  EXPECT_LT(mx::max(mx::abs(mx::subtract(got, want))).item<float>() / mx::max(mx::abs(want)).item<float>(), 1e-4f);

  session.undo();
  const auto again = session.say(paragraph(99));
  EXPECT_GT(again.stats.cached_tokens, 3 * 128 - 100) << "from a snapshot";
}

TEST_F(SmallModelTest, G4EightBitsFromTheStartAndFromTheMiddleOfAnAnswerStayNearTheDenseCache) {
  const Tokens prompt = shared->tokenizer.encode("My name is Ada and I live in a small town by the sea. My name is");
  const auto size = static_cast<int>(prompt.size());
  const auto run = [&](const KVCacheOptions& kv, const Tokens& more) {
    RecordedCache cache{make_prompt_cache(*shared->model, kv.max_kv_size), {}};
    generate(*shared, prompt, cache, {.max_tokens = 0, .kv_cache = kv});
    for (const TokenId id : more) generate(*shared, Tokens{id}, cache, {.max_tokens = 0, .kv_cache = kv});
    return last_logits({42}, cache.cache);
  };
  RecordedCache dense{shared->model->make_cache(), {}};
  const auto answer = generate(*shared, prompt, dense, {.max_tokens = 4}).tokens;
  const auto want = run({}, answer);
  const auto error = [&](const KVCacheOptions& kv) {
    const auto got = run(kv, answer);
    return mx::max(mx::abs(mx::subtract(got, want))).item<float>() / mx::max(mx::abs(want)).item<float>();
  };
  EXPECT_LT(error({.kv_bits = 8, .quantized_kv_start = 0}), 0.03f);
  EXPECT_LT(error({.kv_bits = 8, .quantized_kv_start = size + 2}), 0.03f);
  EXPECT_LT(error({.max_kv_size = 256, .kv_bits = 8, .quantized_kv_start = size + 2}), 0.03f);
  EXPECT_LT(error({.kv_bits = 4, .quantized_kv_start = size + 2}), 0.4f);

  RecordedCache cache{shared->model->make_cache(), {}};
  const auto crossed =
      generate(*shared, prompt, cache, {.max_tokens = 4, .kv_cache = {.kv_bits = 8, .quantized_kv_start = size + 2}});
  EXPECT_EQ(crossed.tokens, answer);
  EXPECT_EQ(cache.cache[0].class_name(), "QuantizedKVCache");
}

}  // namespace
}  // namespace reprise
