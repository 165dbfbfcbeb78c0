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
  EXPECT_LT(mx::max(mx::abs(mx::subtract(got, want))).item<float>() / mx::max(mx::abs(want)).item<float>(), 1e-4f);
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

}  // namespace
}  // namespace reprise
