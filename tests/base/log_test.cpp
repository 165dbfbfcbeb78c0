#include "reprise/base/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace reprise {
namespace {

class Log : public testing::Test {
 protected:
  void TearDown() override { set_log_hook({}); }
};

TEST_F(Log, WithoutAHookNothingHappens) { log(LogLevel::error, "dropped"); }

TEST_F(Log, TheHookGetsLevelAndText) {
  std::vector<std::string> seen;
  set_log_hook([&](LogLevel level, const std::string& message) {
    seen.push_back(std::to_string(static_cast<int>(level)) + message);
  });
  log(LogLevel::debug, "a");
  log(LogLevel::warning, "b");
  set_log_hook({});
  log(LogLevel::warning, "c");
  EXPECT_EQ(seen, (std::vector<std::string>{"0a", "2b"}));
}

TEST_F(Log, AHookMayLogAndReplaceItself) {
  int calls = 0;
  set_log_hook([&](LogLevel level, const std::string&) {
    ++calls;
    set_log_hook([&](LogLevel, const std::string&) { calls += 10; });
    log(level, "again");
  });
  log(LogLevel::info, "once");
  EXPECT_EQ(calls, 11);
}

TEST_F(Log, ThreadsMayLogWhileTheHookIsReplaced) {
  std::atomic<int> calls = 0;
  const LogHook count = [&](LogLevel, const std::string&) { ++calls; };
  set_log_hook(count);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < 500; ++n) log(LogLevel::info, "x");
      });
    }
    for (int n = 0; n < 500; ++n) set_log_hook(count);
  }
  EXPECT_EQ(calls, 2000);
}

}  // namespace
}  // namespace reprise
