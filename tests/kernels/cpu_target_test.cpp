#define HWY_WANT_AVX3_DL  // as the kernels have it
#include "reprise/kernels/cpu_target.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "reprise/base/log.h"

namespace reprise::kernels {
namespace {

// The variable is read once, so each value is tried in a process of its own. A death test sees what is written to
// standard error.
class CpuTargetDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  [[noreturn]] static void tell(const char* value) {
    set_log_hook([](LogLevel, const std::string& message) { std::cerr << message << '\n'; });
    if (value) {
      setenv("REPRISE_CPU_TARGET", value, 1);
    } else {
      unsetenv("REPRISE_CPU_TARGET");
    }
    const std::string target = cpu_target();
    std::cerr << "chosen " << target << ", best for Highway " << best() << '\n';
    std::exit(0);
  }

  static std::string best() {
    const auto targets = hwy::SupportedTargets() & HWY_TARGETS;
    return hwy::TargetName(targets & -targets);
  }
};

TEST_F(CpuTargetDeathTest, WithoutTheVariableItIsTheBest) {
  for (const char* value : {static_cast<const char*>(nullptr), ""}) {
    EXPECT_EXIT(tell(value), testing::ExitedWithCode(0), "^chosen " + best() + ", ");
  }
}

TEST_F(CpuTargetDeathTest, WhatTheMachineDoesNotHaveIsReportedAndTheBestTaken) {
  for (const char* value : {"nonsense", "AVX2 ", "RVV"}) {
    EXPECT_EXIT(tell(value), testing::ExitedWithCode(0),
                "REPRISE_CPU_TARGET must be one of [A-Z0-9_, ]+ on this machine, but got \"" + std::string(value) +
                    "\": using " + best() + "\nchosen " + best() + ", ");
  }
}

#if HWY_ARCH_X86
TEST_F(CpuTargetDeathTest, TheLeastIsAlwaysThere) {
  EXPECT_EXIT(tell("SSE2"), testing::ExitedWithCode(0), "^chosen SSE2, best for Highway (EMU128|SSE2|SCALAR)\n$");
}

TEST_F(CpuTargetDeathTest, ALesserOneIsTakenWhateverTheCase) {
  if ((hwy::SupportedTargets() & HWY_AVX2) == 0) GTEST_SKIP() << "this machine has no AVX2";
  for (const char* value : {"AVX2", "avx2"}) {
    EXPECT_EXIT(tell(value), testing::ExitedWithCode(0), "^chosen AVX2, best for Highway AVX2\n$");
  }
}
#endif

}  // namespace
}  // namespace reprise::kernels
