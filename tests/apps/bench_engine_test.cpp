// `reprise bench engine` with the small model.
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

using Json = nlohmann::json;

Outcome bench(const std::string& model, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"bench", "engine", "--model", model};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

Json figures(const std::string& model, std::vector<std::string> more) {
  more.insert(more.end(), {"--json", "--each-request"});
  const auto outcome = bench(model, more);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(count_lines(outcome.out), 1) << outcome.out;
  return Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
}

TEST(BenchEngine, FiguresAreOneLineOfJsonThatFitTogether) {
  REPRISE_NEED_MODEL(model);
  const auto found =
      figures(model, {"--trace", "multi-turn", "--total", "2", "--scale", "0.1", "-m", "3", "--conversations", "2"});
  ASSERT_TRUE(found.is_object());
  EXPECT_EQ(found["requests"], 12);
  EXPECT_EQ(found["failed"], 0);
  EXPECT_EQ(found["completion_tokens"], 36);
  EXPECT_EQ(found["over_budget"], 0);
  EXPECT_LE(found["peak_nbytes"], found["max_bytes"]);
  EXPECT_GT(found["peak_nbytes"], 0);
  EXPECT_GT(found["ttft_ms"]["p50"], 0);
  EXPECT_LE(found["ttft_ms"]["p50"], found["ttft_ms"]["p99"]);
  EXPECT_NEAR(found["completion_tps"].get<double>() * found["wall_s"].get<double>(), 36, 1);
  int prompts = 0, cached = 0;
  for (const auto& request : found["each"]) {
    const int prompt = request["prompt_tokens"], from_cache = request["cached_tokens"];
    EXPECT_LT(from_cache, prompt);
    EXPECT_TRUE(request["turn"] == 0 || from_cache > 0) << "a turn goes on from nothing";
    prompts += prompt;
    cached += from_cache;
  }
  EXPECT_EQ(found["prompt_tokens"], prompts);
  EXPECT_EQ(found["cached_tokens"], cached);
}

TEST(BenchEngine, NothingIsReusedWithoutACache) {
  REPRISE_NEED_MODEL(model);
  const std::vector<std::string> flags = {"--trace", "shared-prefix",   "--total", "3", "--scale", "0.02", "-m",
                                          "2",       "--conversations", "1"};
  EXPECT_GT(figures(model, flags)["cached_tokens"], 0);
  auto cold = flags;
  cold.push_back("--no-cache");
  EXPECT_EQ(figures(model, cold)["cached_tokens"], 0);
}

TEST(BenchEngine, AnExportedTraceIsTheSameTrace) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("trace.jsonl");
  const std::vector<std::string> flags = {"--trace", "fork",   "--total", "2",  "--scale",
                                          "0.02",    "--seed", "3",       "-m", "2"};
  auto exporting = flags;
  exporting.insert(exporting.end(), {"--export", file});
  const auto exported = bench(model, exporting);
  ASSERT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_EQ(exported.out, "");
  const auto made = figures(model, flags);
  const auto read = figures(model, {"--trace", file});
  EXPECT_EQ(made["prompt_tokens"], read["prompt_tokens"]);
  EXPECT_EQ(made["completion_tokens"], read["completion_tokens"]);
  EXPECT_EQ(made["requests"], read["requests"]);
}

TEST(BenchEngine, TextsAndMessagesBecomeTokens) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("trace.jsonl");
  std::ofstream(file) << R"({"conversation":"a","text":"The sky is","max_tokens":2}
{"conversation":"a","text":" and the sea is","max_tokens":2}
{"conversation":"b","messages":[{"role":"user","content":"Hello"}],"max_tokens":1}
)";
  const auto found = figures(model, {"--trace", file});
  EXPECT_EQ(found["requests"], 3);
  EXPECT_EQ(found["completion_tokens"], 5);
  EXPECT_EQ(found["each"][0]["prompt_tokens"], 3);
  EXPECT_EQ(found["each"][1]["prompt_tokens"], 3 + 2 + 4);
}

TEST(BenchEngine, ARequestThatFailsIsSaidAndTheOthersCount) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("trace.jsonl");
  std::ofstream(file) << R"({"conversation":"a","prompt_tokens":[5,6],"max_tokens":2}
{"conversation":"b","prompt_tokens":[5,1000000],"max_tokens":2}
)";
  const auto outcome = bench(model, {"--trace", file, "--json"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("conversation b, turn 0: "), std::string::npos) << outcome.err;
  const auto json = Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["completion_tokens"], 2);
}

TEST(BenchEngine, APersonIsToldTheSame) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = bench(model, {"--trace", "edit", "--total", "1", "--scale", "0.02", "-m", "2"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("trace        edit, 1 conversations, 4 at a time"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("answers      12 tokens"), std::string::npos) << outcome.out;
}

TEST(BenchEngine, WrongFlagsAreRefusedBeforeAModelIsLoaded) {
  const auto early = run_program({"bench", "--model", "x", "engine", "--model", "x"});
  EXPECT_EQ(early.exit_code, 2);
  EXPECT_NE(early.err.find("behind the word engine"), std::string::npos) << early.err;
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--conversations", "0"},
                                                {"--conversations", "1025"},
                                                {"--cache-bytes", "2T"},
                                                {"--scale", "0"},
                                                {"--total", "0"},
                                                {"--cache-dir", ""},
                                                {"--prompt", "3"}}) {
    const auto refused = bench("/nowhere", flags);
    EXPECT_EQ(refused.exit_code, 2) << flags[0];
    EXPECT_EQ(count_lines(refused.err), 1) << refused.err;
  }
  const auto nowhere = bench("/nowhere", {});
  EXPECT_EQ(nowhere.exit_code, 1);
}

TEST(BenchEngine, AnInterruptEndsIt) {
  REPRISE_NEED_MODEL(model);
  Program program({"bench", "engine", "--model", model, "--trace", "document"});
  ::usleep(1500000);  // it has loaded the model by then, or takes the interrupt afterwards
  program.signal(SIGINT);
  const auto outcome = program.finish();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

}  // namespace
}  // namespace reprise::test
