// `reprise chat` through a pipe, with the small model.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

std::vector<std::string> chat(const std::string& model, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"chat", "--model", model, "--stats"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// What was written to standard output since `before`, without the last newline.
std::string since(const std::string& out, std::size_t before) { return out.substr(before, out.size() - before - 1); }

TEST(Chat, G5G6RemembersAndComputesOnlyWhatIsNew) {
  REPRISE_NEED_MODEL(model);
  const auto outcome =
      run_program(chat(model, {"--temp", "0", "--max-tokens", "40"}), "My name is Ada.\nWhat is my name?\n");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Ada"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.back(), '\n');
  EXPECT_EQ(count_lines(outcome.err), 2) << outcome.err;
  auto first = stats_of(outcome.err, 0);
  auto second = stats_of(outcome.err, 1);
  EXPECT_EQ(first["cached_tokens"], 0);
  EXPECT_GT(first["prompt_tokens"], 5);
  EXPECT_GT(first["ttft_ms"], 0);
  EXPECT_GE(second["cached_tokens"], first["prompt_tokens"] + first["completion_tokens"] - 1);
  EXPECT_GT(second["prompt_tokens"], second["cached_tokens"]);
}

TEST(Chat, GoesOnAfterSaveEndAndLoadAsIfItHadNotStopped) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("chat.safetensors");
  const auto arguments = chat(model, {"--temp", "0.8", "--seed", "5", "--max-tokens", "12"});

  Program whole(arguments);
  whole.write("My name is Ada.\n/save " + file + "\n");
  ASSERT_TRUE(whole.wait_for_error("saved")) << whole.err();
  const auto before = whole.out().size();
  whole.write("What is my name?\n");
  const auto first = whole.finish();
  ASSERT_EQ(first.exit_code, 0) << first.err;

  const auto second = run_program(arguments, "/load " + file + "\nWhat is my name?\n");
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(second.out, first.out.substr(before));
  EXPECT_EQ(stats_of(second.err, 0)["cached_tokens"], stats_of(first.err, 1)["cached_tokens"]);
}

TEST(Chat, G12ABoundedChatIsLoadedWithItsOwnOptions) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("chat.safetensors");
  const std::vector<std::string> short_answers = {"--temp", "0", "--max-tokens", "6"};
  auto bounded = chat(model, short_answers);
  bounded.insert(bounded.end(), {"--max-kv-size", "32"});
  const auto first = run_program(bounded, "My name is Ada.\nAnd yours?\n/save " + file + "\nSay it again.\n");
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.err.find("layers 0-29: RotatingKVCache(32, keep 4)\n"), 0u) << first.err;
  const auto second = run_program(chat(model, short_answers), "/load " + file + "\nSay it again.\n");
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_NE(second.err.find("layers 0-29: RotatingKVCache(32, keep 4)"), std::string::npos) << second.err;
  EXPECT_TRUE(first.out.ends_with(second.out)) << first.out << second.out;
  EXPECT_EQ(stats_of(second.err, 0)["cached_tokens"], stats_of(first.err, 2)["cached_tokens"]);
}

TEST(Chat, TheSameQuestionAfterUndoGetsTheSameAnswer) {
  REPRISE_NEED_MODEL(model);
  Program program(chat(model, {"--max-tokens", "12"}));
  program.write("I like tea.\n");
  ASSERT_TRUE(program.wait_for_error("stats {")) << program.err();
  auto before = program.out().size();
  program.write("What do I like?\n");
  ASSERT_TRUE(program.wait_for_error("stats {")) << program.err();
  const auto first = since(program.out(), before);
  before = program.out().size();
  program.write("/undo\nWhat do I like?\n");
  ASSERT_TRUE(program.wait_for_error("took back: What do I like?")) << program.err();
  ASSERT_TRUE(program.wait_for_error("stats {")) << program.err();
  EXPECT_EQ(since(program.out(), before), first);
  EXPECT_GT(stats_of(program.err(), 2)["cached_tokens"], 20);
  EXPECT_EQ(program.finish().exit_code, 0);
}

TEST(Chat, AnInterruptStopsTheAnswerAndTheChatGoesOn) {
  REPRISE_NEED_MODEL(model);
  Program program(chat(model, {"--max-tokens", "60"}));
  program.write("Write a long story about the sea.\n");
  ASSERT_TRUE(program.wait_for_output(" ")) << program.err();
  program.signal(SIGINT);
  ASSERT_TRUE(program.wait_for_error("(stopped)")) << program.err();
  ASSERT_TRUE(program.wait_for_error("stats {"));
  program.write("/stats\n");
  ASSERT_TRUE(program.wait_for_error("1 turn,"));
  program.write("Say yes.\n");
  ASSERT_TRUE(program.wait_for_error("stats {"));
  const auto outcome = program.finish();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  auto first = stats_of(outcome.err, 0);
  auto second = stats_of(outcome.err, 1);
  EXPECT_LT(first["completion_tokens"], 60);
  EXPECT_GE(second["cached_tokens"], first["prompt_tokens"] + first["completion_tokens"] - 1);
}

TEST(Chat, TwoInterruptsEndAPipeOfQueuedLines) {
  REPRISE_NEED_MODEL(model);
  for (const auto pause : {std::chrono::milliseconds(5), std::chrono::milliseconds(1500)}) {
    Program program(chat(model, {"--max-tokens", "400"}));
    std::string lines;
    for (int i = 0; i < 30; ++i) lines += "Write a long story about the sea.\n";
    program.write(lines);
    ASSERT_TRUE(program.wait_for_output(" ")) << program.err();
    program.signal(SIGINT);
    std::this_thread::sleep_for(pause);
    program.signal(SIGINT);
    EXPECT_EQ(program.finish(std::chrono::seconds(20)).exit_code, 130);
  }
}

TEST(Chat, ALoadedNameMayBeTheSavedOne) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto name = folder.file("talk");
  const auto outcome = run_program(chat(model, {"--max-tokens", "2"}), "Hi\n/save " + name + "\n/load " + name + "\n");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("loaded 1 turn,"), std::string::npos) << outcome.err;
  const auto refused = run_program({"generate", "--model", model, "--prompt-cache-file", name});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.err.find("/load"), std::string::npos) << refused.err;
  const auto inspected = run_program({"inspect", name});
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_NE(inspected.out.find("KVCache"), std::string::npos) << inspected.out;
}

TEST(Chat, G12LoadingAChatWithoutABoundSaysThatTheBoundIsGone) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto name = folder.file("talk");
  ASSERT_EQ(run_program(chat(model, {"--max-tokens", "2"}), "Hi\n/save " + name + "\n").exit_code, 0);
  const auto outcome = run_program(chat(model, {"--max-kv-size", "32"}), "/load " + name + "\n");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("\nlayers 0-29: KVCache\n"), std::string::npos) << outcome.err;
}

TEST(Chat, TwoInterruptsLeave) {
  REPRISE_NEED_MODEL(model);
  Program program(chat(model));
  program.write("/stats\n");
  ASSERT_TRUE(program.wait_for_error("0 turns"));
  program.signal(SIGINT);
  ASSERT_TRUE(program.wait_for_error("once more"));
  program.signal(SIGINT);
  // The input stays open: only the signal can end it.
  EXPECT_FALSE(program.wait_for_output("never", std::chrono::seconds(60)));
  EXPECT_EQ(program.finish().exit_code, 130);
}

TEST(Chat, ABadLineIsOneErrorAndTheChatGoesOn) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = run_program(chat(model, {"--max-tokens", "2"}),
                                   "\xFF\xFE\n/nonsense\n\n/save /no/such/folder/x\n/load /no/such/file.safetensors\n"
                                   "/undo\n/system Be brief.\r\n//Hi\r\nBye");
  EXPECT_EQ(outcome.exit_code, 1) << "errors in a script must not pass for success";
  EXPECT_NE(outcome.err.find("not UTF-8"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("/nonsense"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("/no/such/folder"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("/no/such/file"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("nothing to take back"), std::string::npos) << outcome.err;
  EXPECT_FALSE(stats_of(outcome.err, 1).empty()) << "both messages must be answered: " << outcome.err;
  EXPECT_TRUE(stats_of(outcome.err, 2).empty()) << "and nothing else: " << outcome.err;
  EXPECT_EQ(count_lines(outcome.err), 8) << outcome.err;
}

TEST(Chat, AReaderWhoGoesAwayEndsItCleanly) {
  REPRISE_NEED_MODEL(model);
  Program program(chat(model, {"--max-tokens", "200"}));
  program.write("Count from one to fifty.\n");
  ASSERT_TRUE(program.wait_for_output(" "));
  program.close_output();
  const auto outcome = program.finish(std::chrono::seconds(60));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
}

TEST(Chat, AFullDiskIsAnError) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = run_program(chat(model, {"--max-tokens", "2"}), "Hi\n", {.output_file = "/dev/full"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("standard output"), std::string::npos) << outcome.err;
}

TEST(Chat, AFileOfSomethingElseIsRefusedAndTheConversationStays) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("noise.safetensors");
  std::ofstream(file) << "this is no prompt cache";
  const auto outcome = run_program(chat(model, {"--max-tokens", "2"}), "Hi\n/load " + file + "\n/stats\n");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("noise.safetensors"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("1 turn,"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace reprise::test
