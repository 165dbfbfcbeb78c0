// `reprise generate` and `reprise cache-prompt` with the small model.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

std::vector<std::string> generate(const std::string& model, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"generate", "--model", model, "--verbose", "false", "--stats"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Outcome cache_prompt(const std::string& model, const std::string& prompt, const std::string& file,
                     const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments = {"cache-prompt", "--model", model, "--prompt", "-", "--prompt-cache-file", file};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments, prompt);
}

TEST(Generate, G10G11ContinuingACachedPromptEqualsTheWholePrompt) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  const auto cached = cache_prompt(model, "Ada has seven cats and", file);
  ASSERT_EQ(cached.exit_code, 0) << cached.err;
  EXPECT_EQ(cached.out, "");
  EXPECT_NE(cached.err.find("Processed"), std::string::npos);

  const auto whole = run_program(generate(model, {"-p", "Ada has seven cats and one dog. How many cats?", "-m", "12"}));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  // The model is named by the file.
  const auto warm = run_program({"generate", "--prompt-cache-file", file, "-p", " one dog. How many cats?", "-m", "12",
                                 "--verbose", "f", "--stats"});
  ASSERT_EQ(warm.exit_code, 0) << warm.err;
  EXPECT_EQ(warm.out, whole.out);
  EXPECT_EQ(warm.err.find("warning"), std::string::npos) << warm.err;
  auto whole_stats = stats_of(whole.err, 0);
  auto warm_stats = stats_of(warm.err, 0);
  EXPECT_EQ(warm_stats["prompt_tokens"], whole_stats["prompt_tokens"]);
  EXPECT_GT(warm_stats["cached_tokens"], 20);
}

TEST(Generate, G11ATokenAcrossTheSeamIsNoticedAndMended) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  ASSERT_EQ(cache_prompt(model, "Tell me about ele", file).exit_code, 0);
  const auto warm = run_program(generate(model, {"--prompt-cache-file", file, "-p", "phants.", "-m", "6"}));
  ASSERT_EQ(warm.exit_code, 0) << warm.err;
  EXPECT_NE(warm.err.find("within a token"), std::string::npos) << warm.err;
  const auto whole = run_program(generate(model, {"-p", "Tell me about elephants.", "-m", "6"}));
  EXPECT_EQ(warm.out, whole.out);
}

TEST(Generate, G10G11AQuantisedPromptIsSavedSoAndContinuedOnlyWithItsOwnNumbers) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  const auto cached = cache_prompt(model, "My name is Ada and", file,
                                   {"--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"});
  ASSERT_EQ(cached.exit_code, 0) << cached.err;
  EXPECT_NE(cached.err.find("from token 0 on QuantizedKVCache(8 bits, groups of 32)"), std::string::npos) << cached.err;
  const auto continued = [&](const std::vector<std::string>& flags) {
    auto arguments = generate(model, {"--prompt-cache-file", file, "-p", " I have a cat.", "-m", "2"});
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return run_program(arguments);
  };
  const auto warm = continued({"--kv-bits", "8", "--kv-group-size", "32"});
  ASSERT_EQ(warm.exit_code, 0) << warm.err;
  EXPECT_NE(warm.err.find("layers 0-29: QuantizedKVCache(8 bits, groups of 32)"), std::string::npos) << warm.err;
  EXPECT_EQ(continued({}).out, warm.out) << "the file's own numbers count where none are given";
  const auto checked = continued({"--verify-reuse"});
  EXPECT_EQ(checked.out, warm.out);
  EXPECT_LT(stats_of(checked.err, 0)["reuse_error"], 1e-6) << "quantised where the file was: " << checked.err;
  const std::vector<std::pair<std::string, std::string>> others = {
      {"--kv-bits", "4"}, {"--kv-group-size", "64"}, {"--max-kv-size", "100"}};
  for (const auto& [flag, value] : others) {
    const auto refused = continued({flag, value});
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_EQ(refused.out, "");
    EXPECT_NE(refused.err.find("layer 0, but " + flag + " " + value), std::string::npos) << refused.err;
  }
}

TEST(Generate, F8AGroupSizeThatDoesNotFitIsOneErrorThatSaysWhatFits) {
  REPRISE_NEED_MODEL(model);
  const auto refused = run_program(generate(model, {"-p", "hi", "--kv-bits", "4", "--kv-group-size", "128"}));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_EQ(refused.out, "");
  EXPECT_EQ(count_lines(refused.err), 1) << refused.err;
  EXPECT_NE(refused.err.find("--kv-group-size 32 or 64"), std::string::npos) << refused.err;
}

TEST(Generate, G8X8ABoundedPromptIsContinuedAndVerified) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  std::string text = "Numbers:";
  for (int i = 0; i < 40; ++i) text += " " + std::to_string(i);
  const auto cached = cache_prompt(model, text, file, {"--max-kv-size", "64", "--prefill-step-size", "32"});
  ASSERT_EQ(cached.exit_code, 0) << cached.err;
  const auto warm = run_program(generate(model, {"--prompt-cache-file", file, "-p", " and so on.", "-m", "3",
                                                 "--prefill-step-size", "32", "--verify-reuse"}));
  ASSERT_EQ(warm.exit_code, 0) << warm.err;
  EXPECT_NE(warm.err.find("layers 0-29: RotatingKVCache(64, keep 4)"), std::string::npos) << warm.err;
  EXPECT_NE(warm.err.find("\"reuse_checks\":1,\"reuse_mismatches\":0"), std::string::npos) << warm.err;
  EXPECT_GT(stats_of(warm.err, 0)["cached_tokens"], 64);
  // What a window holds depends on the pieces: the file says which they were, whatever this run's are.
  const auto other =
      run_program(generate(model, {"--prompt-cache-file", file, "-p", " and so on.", "-m", "3", "--verify-reuse"}));
  EXPECT_EQ(other.out, warm.out);
  EXPECT_NE(other.err.find("\"reuse_checks\":1,\"reuse_mismatches\":0"), std::string::npos) << other.err;
}

TEST(Generate, AnotherSystemPromptThanTheCachesIsNoticed) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  ASSERT_EQ(cache_prompt(model, "Hello", file).exit_code, 0);
  const auto outcome = run_program(
      generate(model, {"--prompt-cache-file", file, "--system-prompt", "Be brief.", "-p", " there", "-m", "1"}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("another system prompt"), std::string::npos) << outcome.err;
}

TEST(Generate, ALegacyFileHasNoRecordAndSaysSo) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  ASSERT_EQ(cache_prompt(model, "Say", file, {"--cache-format", "legacy"}).exit_code, 0);
  const auto outcome = run_program(generate(model, {"--prompt-cache-file", file, "-p", " yes.", "-m", "2"}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("cannot be verified"), std::string::npos) << outcome.err;
  const auto whole = run_program(generate(model, {"-p", "Say yes.", "-m", "2"}));
  EXPECT_EQ(outcome.out, whole.out);

  // Nobody knows what to compute again: the answer stays the file's.
  const auto checked =
      run_program(generate(model, {"--prompt-cache-file", file, "-p", " yes.", "-m", "2", "--verify-reuse"}));
  EXPECT_EQ(checked.exit_code, 0) << checked.err;
  EXPECT_EQ(checked.out, whole.out);
  EXPECT_NE(checked.err.find("--verify-reuse does nothing here"), std::string::npos) << checked.err;
  EXPECT_EQ(checked.err.find("reuse_checks"), std::string::npos) << checked.err;
}

TEST(Generate, AnotherDtypeThanTheCachesIsSaidOnce) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  ASSERT_EQ(cache_prompt(model, "Say", file, {"--kv-dtype", "float16"}).exit_code, 0);
  const auto other =
      run_program(generate(model, {"--prompt-cache-file", file, "-p", " yes.", "-m", "1", "--kv-dtype", "float32"}));
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_NE(other.err.find("--kv-dtype float16"), std::string::npos) << other.err;
  EXPECT_EQ(count_lines(other.err), 2) << "a warning and the figures: " << other.err;
  const auto same =
      run_program(generate(model, {"--prompt-cache-file", file, "-p", " yes.", "-m", "1", "--kv-dtype", "float16"}));
  EXPECT_EQ(same.err.find("warning"), std::string::npos) << same.err;
}

TEST(Generate, TheFileNamesItsModelSoThatItIsFoundFromAnywhere) {
  REPRISE_NEED_MODEL(model);
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  const auto moved = folder.file("moved.gguf");
  if (fs::path(model).extension() != ".gguf") GTEST_SKIP() << "the model is no .gguf file";
  fs::create_symlink(fs::absolute(model), moved);
  ASSERT_EQ(cache_prompt(fs::path(moved).lexically_relative(fs::current_path()).string(), "Say", file).exit_code, 0);
  EXPECT_NE(run_program({"inspect", file}).out.find(moved), std::string::npos);
  fs::remove(moved);
  const auto outcome = run_program({"generate", "--prompt-cache-file", file});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("--model"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find(moved), std::string::npos) << outcome.err;
}

TEST(Generate, ADamagedOrMissingCacheFileIsOneError) {
  REPRISE_NEED_MODEL(model);
  const TemporaryFolder folder;
  const auto file = folder.file("prompt.safetensors");
  std::ofstream(file) << std::string(100, 'x');
  for (const auto& name : {file, folder.file("nothing.safetensors")}) {
    const auto outcome = run_program(generate(model, {"--prompt-cache-file", name}));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(count_lines(outcome.err), 1) << outcome.err;
  }
}

TEST(Generate, ReadsThePromptFromStandardInput) {
  REPRISE_NEED_MODEL(model);
  const auto from_flag = run_program(generate(model, {"-p", "Say\\nyes.", "-m", "3"}));
  const auto from_input = run_program(generate(model, {"-p", "-", "-m", "3"}), "Say\nyes.");
  EXPECT_EQ(from_flag.exit_code, 0) << from_flag.err;
  EXPECT_EQ(from_flag.out, from_input.out);
  EXPECT_EQ(stats_of(from_flag.err, 0)["prompt_tokens"], stats_of(from_input.err, 0)["prompt_tokens"]);
}

TEST(Generate, StopStringsAndExtraEndTokensEndTheAnswer) {
  REPRISE_NEED_MODEL(model);
  const std::vector<std::string> question = {"-p", "Count: one, two, three", "-m", "12"};
  const auto plain = run_program(generate(model, question));
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  ASSERT_GT(plain.out.size(), 8u);
  const auto word = plain.out.substr(3, 3);
  auto stopped = question;
  stopped.insert(stopped.end(), {"--stop", word});
  const auto outcome = run_program(generate(model, stopped));
  EXPECT_EQ(outcome.out, plain.out.substr(0, plain.out.find(word)) + "\n") << plain.out;
  auto unknown = question;
  unknown.insert(unknown.end(), {"--extra-eos-token", "<|no such token|>"});
  EXPECT_EQ(run_program(generate(model, unknown)).exit_code, 2);
}

TEST(Generate, ThePrefilledResponseIsContinued) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = run_program(generate(
      model, {"-p", "What is the capital of France?", "--prefill-response", "The capital of France is", "-m", "4"}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Paris"), std::string::npos) << outcome.out;
}

TEST(Generate, AnInterruptKeepsWhatCame) {
  REPRISE_NEED_MODEL(model);
  Program program({"generate", "--model", model, "-p", "Write a long story.", "-m", "400"});
  ASSERT_TRUE(program.wait_for_output(" ")) << program.err();
  program.signal(SIGINT);
  const auto outcome = program.finish();
  EXPECT_EQ(outcome.exit_code, 130);
  EXPECT_EQ(outcome.out.back(), '\n');
  EXPECT_NE(outcome.err.find("Generation:"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace reprise::test
