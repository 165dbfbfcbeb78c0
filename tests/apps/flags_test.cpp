// What the program says to command lines that cannot be meant: one line, exit code 2, no model looked at.
#include <gtest/gtest.h>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

struct Refused {
  std::vector<std::string> arguments;
  std::string mentions;
};

// A model that is not there: whoever gets so far as to look for it fails with exit code 1.
const LaunchOptions kNoModel = {.environment = {{"REPRISE_MODEL", "/no/such/model.gguf"}}};

TEST(Program, WrongUsageIsOneLineAndExitCodeTwo) {
  const Refused cases[] = {
      {{}, "a command is needed"},
      {{"sing"}, "sing"},
      {{"chat", "--nosuchflag"}, "--nosuchflag"},
      {{"chat", "extra"}, "extra"},
      {{"chat", "--model"}, "--model"},
      {{"chat", "--model", ""}, "--model"},
      {{"generate", "--temp", "hot"}, "--temp"},
      {{"generate", "--temp", "-0.5"}, "--temp"},
      {{"generate", "--temp", "nan"}, "--temp"},
      {{"generate", "--temp", "inf"}, "--temp"},
      {{"generate", "--temp", "1e99"}, "--temp"},
      {{"generate", "--temp", "0.5x"}, "--temp"},
      {{"generate", "--temp", ""}, "--temp"},
      {{"generate", "--temp="}, "--temp"},
      {{"generate", "--top-p", "1.5"}, "--top-p"},
      {{"generate", "--top-p", "-1"}, "--top-p"},
      {{"generate", "--min-p", "2"}, "--min-p"},
      {{"generate", "--top-k", "-1"}, "--top-k"},
      {{"generate", "--top-k", "1e99"}, "--top-k"},
      {{"generate", "--top-k", "2.5"}, "--top-k"},
      {{"generate", "--top-k", "99999999999"}, "--top-k"},
      {{"generate", "--min-tokens-to-keep", "0"}, "--min-tokens-to-keep"},
      {{"generate", "--xtc-probability", "1.01"}, "--xtc-probability"},
      {{"generate", "--xtc-threshold", "0.6"}, "--xtc-threshold"},
      {{"generate", "--repetition-penalty", "-1"}, "--repetition-penalty"},
      {{"generate", "--repetition-context-size", "-1"}, "--repetition-context-size"},
      {{"generate", "--presence-penalty", "nan"}, "--presence-penalty"},
      {{"generate", "--max-tokens", "-1"}, "--max-tokens"},
      {{"generate", "-m", "many"}, "--max-tokens"},
      {{"generate", "--max-tokens", "1e99"}, "--max-tokens"},
      {{"generate", "--prefill-step-size", "0"}, "--prefill-step-size"},
      {{"generate", "--seed", "-1"}, "--seed"},
      {{"generate", "--seed", "99999999999999999999"}, "--seed"},
      {{"generate", "--seed", "1.5"}, "--seed"},
      {{"generate", "--stop", ""}, "--stop"},
      {{"generate", "--logit-bias", "{"}, "--logit-bias"},
      {{"generate", "--logit-bias", "[1]"}, "--logit-bias"},
      {{"generate", "--logit-bias", "{\"a\":1}"}, "--logit-bias"},
      {{"generate", "--logit-bias", "{\"-1\":1}"}, "--logit-bias"},
      {{"generate", "--logit-bias", "{\"1\":\"x\"}"}, "--logit-bias"},
      {{"generate", "--logit-bias", "{\"1\":1e400}"}, "--logit-bias"},
      {{"generate", "--chat-template-config", "not json"}, "--chat-template-config"},
      {{"generate", "--chat-template-config", "[]"}, "--chat-template-config"},
      {{"generate", "--chat-template-config", "{\"messages\":[]}"}, "messages"},
      {{"chat", "--chat-template-config", "{\"add_generation_prompt\":false}"}, "add_generation_prompt"},
      {{"generate", "--stop", "\xff\xfe"}, "--stop"},
      {{"generate", "--temp"}, "--temp needs a value"},
      {{"generate", "--prompt-cache-file="}, "--prompt-cache-file"},
      {{"generate", "--prompt-cache-file", "/"}, "--prompt-cache-file"},
      {{"generate", "--dtype", "int8"}, "--dtype"},
      {{"generate", "--kv-bits", "7"}, "--kv-bits must be 2, 3, 4, 5, 6 or 8, but got \"7\""},
      {{"generate", "--kv-bits", "4.0"}, "--kv-bits"},
      {{"generate", "--kv-bits", ""}, "--kv-bits"},
      {{"generate", "--kv-group-size", "48"}, "--kv-group-size must be 32, 64 or 128, but got \"48\""},
      {{"generate", "--kv-group-size", "64x"}, "--kv-group-size"},
      {{"generate", "--quantized-kv-start", "-1"}, "--quantized-kv-start"},
      {{"generate", "--quantized-kv-start", "99999999999"}, "--quantized-kv-start"},
      {{"generate", "--max-kv-size", "4"}, "--max-kv-size must be a whole number from 5"},
      {{"generate", "--max-kv-size", "0"}, "--max-kv-size"},
      {{"generate", "--max-kv-size", "1e3"}, "--max-kv-size"},
      {{"generate", "--max-kv-size"}, "--max-kv-size needs a value"},
      {{"generate", "--verify-reuse", "2"}, "--verify-reuse"},
      {{"generate", "--verify-reuse=-0.5"}, "--verify-reuse"},
      {{"chat", "--verify-reuse=often"}, "--verify-reuse"},
      {{"chat", "--kv-bits", "1"}, "--kv-bits"},
      {{"cache-prompt", "--kv-bits", "16", "--prompt", "x", "--prompt-cache-file", "y"}, "--kv-bits"},
      {{"generate", "--adapter-path", ""}, "--adapter-path must name a folder"},
      {{"generate", "--draft-model", "x"}, "--draft-model is not supported yet"},
      {{"generate", "--num-draft-tokens", "3"}, "--num-draft-tokens is not supported yet"},
      {{"generate", "-qa"}, "--quantize-activations is not supported yet"},
      {{"generate", "--quantize-activations"}, "--quantize-activations is not supported yet"},
      {{"cache-prompt", "--prompt", "x"}, "--prompt-cache-file"},
      {{"cache-prompt", "--prompt-cache-file", "x"}, "--prompt"},
      {{"cache-prompt", "--prompt", "x", "--prompt-cache-file", ""}, "--prompt-cache-file"},
      {{"cache-prompt", "--prompt", "x", "--prompt-cache-file="}, "--prompt-cache-file"},
      {{"cache-prompt", "--prompt", "x", "--prompt-cache-file", "-"}, "--prompt-cache-file"},
      {{"cache-prompt", "--prompt", "x", "--prompt-cache-file", "y", "--cache-format", "new"}, "--cache-format"},
      {{"cache-prompt", "--prompt", "x", "--prompt-cache-file", "y", "--cache-format", "Portable"},
       "--cache-format must be current, portable or legacy, but got \"Portable\""},
      {{"inspect"}, "FILE"},
      {{"generate", "--kv-dtype", "int8"}, "--kv-dtype must be float32, float16 or bfloat16"},
      {{"generate", "--threads", "0"}, "--threads"},
      {{"chat", "--threads", "1025"}, "--threads must be at most 1024"},
      {{"bench", "--prompt", "0"}, "--prompt"},
      {{"bench", "--depth", "-1"}, "--depth"},
      {{"bench", "--decode", "many"}, "--decode"},
      {{"bench", "--batch", "0"}, "--batch"},
      {{"bench", "--repeat", "0"}, "--repeat"},
      {{"bench", "--threads", "two"}, "--threads"},
      {{"bench", "--kv-bits", "7"}, "--kv-bits"},
      {{"bench", "--temp", "-1"}, "--temp"},
      {{"bench", "--max-tokens", "5"}, "--max-tokens"},
      {{"bench", "--depth", "2147483647"}, "together must be at most 16777216 tokens"},
      {{"bench", "--batch", "2147483647"}, "together must be at most 16777216 tokens"},
  };
  for (const auto& refused : cases) {
    std::string line;
    for (const auto& argument : refused.arguments) line += " " + argument;
    SCOPED_TRACE("reprise" + line);
    const auto outcome = run_program(refused.arguments, "", kNoModel);
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(count_lines(outcome.err), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(refused.mentions), std::string::npos) << outcome.err;
  }
}

TEST(Program, GoodFlagsGetAsFarAsTheModel) {
  const std::vector<std::string> cases[] = {
      {"chat"},
      {"chat", "--temp", "0.7", "--top-p", "0", "--min-p", "1", "--top-k", "0", "--seed", "18446744073709551615"},
      {"chat", "--max-tokens", "0", "--max-tokens", "+5", "--stats", "--trust-remote-code"},
      {"generate", "-p", "-5 degrees", "--verbose", "False", "--use-default-chat-template"},
      {"generate", "--prompt=", "--stop", "a", "--stop", "b", "--extra-eos-token", "<a>", "<b>", "--temp", "1"},
      {"generate", "--presence-penalty", "-1.5", "--frequency-penalty", "-2", "--logit-bias", "{\"5\":-1}"},
      {"generate", "--chat-template-config", "{\"enable_thinking\":false}", "--dtype", "bfloat16"},
      {"generate", "--max-kv-size", "5", "--kv-bits", "5", "--kv-group-size", "128", "--quantized-kv-start", "0"},
      {"chat", "--max-kv-size", "2147483647", "--kv-bits", "6", "--verify-reuse"},
      {"chat", "--verify-reuse=0.25", "--verify-reuse", "1", "--stats"},
      {"cache-prompt", "--prompt", "x", "--prompt-cache-file", "x", "--max-kv-size", "64", "--kv-bits", "2"},
      {"cache-prompt", "--prompt", "x", "--prompt-cache-file", "x", "--cache-format", "legacy"},
      {"cache-prompt", "--prompt", "x", "--prompt-cache-file", "x", "--cache-format", "portable"},
      {"chat", "--kv-dtype", "float32", "--threads", "1024"},
      {"bench"},
      {"bench", "--prompt", "1", "--depth", "4000", "--decode", "0", "--batch", "8", "--repeat", "2", "--json"},
      {"bench", "--temp", "1", "--top-p", "0.9", "--seed", "7", "--kv-bits", "8", "--kv-dtype", "float16", "--profile"},
  };
  for (const auto& arguments : cases) {
    SCOPED_TRACE(arguments.back());
    const auto outcome = run_program(arguments, "", kNoModel);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_NE(outcome.err.find("/no/such/model.gguf"), std::string::npos) << outcome.err;
  }
}

TEST(Program, HelpAndVersionGoToStandardOutput) {
  for (const char* command : {"chat", "generate", "cache-prompt", "inspect", "bench"}) {
    const auto help = run_program({command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_NE(help.out.find(std::string(command) == "inspect" ? "FILE" : "--model"), std::string::npos);
  }
  const auto version = run_program({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.rfind("reprise ", 0), 0u) << version.out;
  EXPECT_NE(version.out.find("MLX 0.32"), std::string::npos) << version.out;
#ifndef __APPLE__
  EXPECT_NE(version.out.find("openblas"), std::string::npos) << "the reference BLAS is in use: " << version.out;
#endif
}

TEST(Program, HelpIntoAFullDiskFails) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"chat", "--help"}, {"--version"}}) {
    EXPECT_EQ(run_program(arguments, "", {.output_file = "/dev/full"}).exit_code, 1);
  }
}

TEST(Program, WithoutAModelTheErrorNamesBothWays) {
  const auto outcome =
      run_program({"chat"}, "", {.environment = {{"REPRISE_MODEL", ""}, {"REPRISE_FETCHED_MODEL", ""}}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("--model"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("REPRISE_MODEL"), std::string::npos) << outcome.err;
  EXPECT_EQ(count_lines(outcome.err), 1);
}

TEST(Program, AFolderThatIsNotThereIsKnownBeforeTheWork) {
  const auto outcome =
      run_program({"cache-prompt", "--prompt", "x", "--prompt-cache-file", "/no/such/folder/file"}, "", kNoModel);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("/no/such/folder"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace reprise::test
