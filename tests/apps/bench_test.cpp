// `reprise bench` with the small model.
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

using Json = nlohmann::json;

Outcome bench(const std::string& model, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"bench", "--model", model, "--repeat", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

Json figures(const std::string& model, std::vector<std::string> more) {
  more.push_back("--json");
  const auto outcome = bench(model, more);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(count_lines(outcome.out), 1) << outcome.out;
  return Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
}

TEST(Bench, FiguresAreOneLineOfJsonThatFitTogether) {
  REPRISE_NEED_MODEL(model);
  const auto found = figures(model, {"--prompt", "8", "--depth", "5", "--decode", "4", "--threads", "1"});
  ASSERT_TRUE(found.is_object());
  EXPECT_EQ(found["prompt"], 8);
  EXPECT_EQ(found["depth"], 5);
  EXPECT_EQ(found["decode"], 4);
  EXPECT_EQ(found["batch"], 1);
  EXPECT_EQ(found["threads"], 1);
  EXPECT_GT(found["decode_tps"], 0);
  EXPECT_GT(found["peak_memory"], found["weights_nbytes"]);
  EXPECT_NEAR(found["prefill_tps"].get<double>() * found["ttft_ms"].get<double>(), 8e3, 10);
  EXPECT_NEAR(found["weights_bytes_per_s"].get<double>(),
              found["decode_tps"].get<double>() * found["weights_nbytes"].get<double>(),
              1e-2 * found["weights_bytes_per_s"].get<double>());
  EXPECT_FALSE(found.contains("profile"));
}

TEST(Bench, APersonIsToldTheSame) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = bench(model, {"--prompt", "3", "--decode", "0"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("134.5 million parameters"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("prefill      3 tokens"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("decode"), std::string::npos) << "nothing was decoded: " << outcome.out;
}

TEST(Bench, TheOperationsOfAProfileAndTheRestAreItsWholeTime) {
  REPRISE_NEED_MODEL(model);
  const auto found = figures(model, {"--prompt", "40", "--decode", "5", "--profile"});
  for (const char* part : {"prefill", "decode"}) {
    const Json& profile = found["profile"][part];
    EXPECT_EQ(profile["tokens"], part == std::string("prefill") ? 40 : 5);
    double sum = profile["other_seconds"];
    for (const auto& operation : profile["operations"]) sum += operation["seconds"].get<double>();
    EXPECT_FALSE(profile["operations"].empty()) << part;
    EXPECT_NEAR(sum, profile["seconds"].get<double>(), 1e-9) << part;
  }
  const auto text = bench(model, {"--prompt", "2", "--decode", "2", "--profile"}).out;
  EXPECT_NE(text.find("decode: 2 tokens in "), std::string::npos) << text;
  EXPECT_NE(text.find("other (graph, MLX, host)"), std::string::npos) << text;
}

TEST(Bench, SeveralSequencesAreCountedTogether) {
  REPRISE_NEED_MODEL(model);
  for (const std::vector<std::string>& flags : {std::vector<std::string>{},
                                                {"--depth", "6"},
                                                {"--kv-bits", "8", "--kv-group-size", "32", "--depth", "6"},
                                                {"--temp", "0.8", "--top-p", "0.9", "--kv-dtype", "float32"},
                                                {"--max-kv-size", "8"}}) {
    std::vector<std::string> all = {"--batch", "3", "--prompt", "2", "--decode", "3", "--profile"};
    all.insert(all.end(), flags.begin(), flags.end());
    const auto found = figures(model, all);
    SCOPED_TRACE(all.back());
    EXPECT_EQ(found["batch"], 3);
    EXPECT_EQ(found["profile"]["prefill"]["tokens"], 6);
    EXPECT_EQ(found["profile"]["decode"]["tokens"], 9);
  }
}

TEST(Bench, CachesOfEveryKindAreMeasured) {
  REPRISE_NEED_MODEL(model);
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--kv-bits", "4"}, {"--max-kv-size", "8"}, {"--kv-dtype", "bfloat16"}}) {
    std::vector<std::string> all = {"--depth", "12", "--prompt", "1", "--decode", "2"};
    all.insert(all.end(), flags.begin(), flags.end());
    EXPECT_GT(figures(model, all)["decode_tps"], 0) << flags[0];
  }
}

TEST(Bench, AGroupSizeThatDoesNotFitIsOneError) {
  REPRISE_NEED_MODEL(model);
  const auto refused = bench(model, {"--kv-bits", "8", "--kv-group-size", "128"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_EQ(refused.out, "");
  EXPECT_EQ(count_lines(refused.err), 1) << refused.err;
}

TEST(Bench, AnInterruptEndsIt) {
  REPRISE_NEED_MODEL(model);
  Program program({"bench", "--model", model, "--prompt", "8000", "--prefill-step-size", "8"});
  ::usleep(1500000);  // it has loaded the model by then, or takes the interrupt afterwards
  program.signal(SIGINT);
  const auto outcome = program.finish();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

}  // namespace
}  // namespace reprise::test
