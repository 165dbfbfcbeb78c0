// The program on lesser machines: instruction sets are taken away by $REPRISE_CPU_TARGET, threads by
// $REPRISE_NUM_THREADS.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/apps/program.h"

namespace reprise::test {
namespace {

Outcome answer(const std::string& model, const std::map<std::string, std::string>& environment) {
  Program program({"generate", "--model", model, "--verbose", "false", "--temp", "0", "-m", "12", "-p",
                   "What is the capital of France?"},
                  {.environment = environment});
  return program.finish();
}

TEST(CpuTarget, AnyInstructionSetAnswers) {
  REPRISE_NEED_MODEL(model);
  for (const char* target : {"", "SSE2", "SSE4", "AVX2", "AVX3"}) {
    const auto outcome = answer(model, {{"REPRISE_CPU_TARGET", target}});
    EXPECT_EQ(outcome.exit_code, 0) << target << ": " << outcome.err;
    EXPECT_NE(outcome.out.find("Paris"), std::string::npos) << target << ": " << outcome.out;
  }
}

TEST(CpuTarget, AnUnknownOneIsSaidAndTheBestIsTaken) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = answer(model, {{"REPRISE_CPU_TARGET", "MMX"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("REPRISE_CPU_TARGET must be one of "), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("but got \"MMX\": using "), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.out.find("Paris"), std::string::npos) << outcome.out;
}

TEST(CpuThreads, TheirNumberChangesNothing) {
  REPRISE_NEED_MODEL(model);
  const auto one = answer(model, {{"REPRISE_NUM_THREADS", "1"}});
  EXPECT_EQ(one.exit_code, 0) << one.err;
  for (const char* threads : {"2", "3"}) {
    EXPECT_EQ(answer(model, {{"REPRISE_NUM_THREADS", threads}}).out, one.out) << threads << " threads";
  }
}

TEST(CpuThreads, ANumberThatIsNoneIsSaid) {
  REPRISE_NEED_MODEL(model);
  const auto outcome = answer(model, {{"REPRISE_NUM_THREADS", "many"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("REPRISE_NUM_THREADS must be a number from 1 to 1024, but got \"many\""),
            std::string::npos)
      << outcome.err;
}

}  // namespace
}  // namespace reprise::test
