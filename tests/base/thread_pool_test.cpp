#include "reprise/base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/base/processors.h"

namespace reprise {
namespace {

using std::chrono::milliseconds;

TEST(ThreadPool, EachTaskIsDoneOnceWhateverTheNumbers) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int tasks : {0, 1, 2, 3, 7, 100}) {
      for (int round = 0; round < 20; ++round) {
        std::vector<int> done(static_cast<std::size_t>(tasks), 0);  // plain: run makes the writes visible
        pool.run(tasks, [&](int i) { ++done[static_cast<std::size_t>(i)]; });
        EXPECT_EQ(done, std::vector<int>(static_cast<std::size_t>(tasks), 1)) << threads << " threads";
      }
    }
  }
}

TEST(ThreadPool, ManyShortRunsLoseNoTask) {
  ThreadPool pool(2);
  std::atomic<std::int64_t> sum = 0;
  for (int round = 0; round < 20000; ++round) {
    pool.run(3, [&](int i) { sum.fetch_add(i + 1, std::memory_order_relaxed); });
  }
  EXPECT_EQ(sum, 6 * 20000);
}

TEST(ThreadPool, WorkersThatSleepAreWoken) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(milliseconds(2));
    std::atomic<int> there = 0;
    // Each task waits for all three: only three threads can end them.
    pool.run(3, [&](int) {
      ++there;
      while (there < 3) std::this_thread::yield();
    });
    EXPECT_EQ(there, 3);
  }
}

TEST(ThreadPool, OneLongTaskDoesNotHoldUpTheOthers) {
  ThreadPool pool(2);
  std::atomic<int> others = 0;
  std::atomic<bool> in_time = true;
  pool.run(50, [&](int i) {
    if (i != 49) {
      ++others;
      return;
    }
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (others < 49 && in_time) {
      in_time = std::chrono::steady_clock::now() < limit;
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(in_time);
}

TEST(ThreadPool, ItHasAsManyThreadsAsSaid) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    std::mutex mutex;
    std::set<std::thread::id> seen;
    std::atomic<int> there = 0;
    pool.run(threads, [&](int) {
      {
        const std::lock_guard lock(mutex);
        seen.insert(std::this_thread::get_id());
      }
      ++there;
      while (there < threads) std::this_thread::yield();
    });
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(threads));
    EXPECT_TRUE(seen.contains(std::this_thread::get_id()));
  }
}

TEST(ThreadPool, ATaskMayRunTasksOfItsOwn) {
  ThreadPool pool(3);
  std::atomic<int> inner = 0;
  pool.run(8, [&](int) {
    const auto here = std::this_thread::get_id();
    pool.run(5, [&](int) {
      EXPECT_EQ(std::this_thread::get_id(), here);
      ++inner;
    });
  });
  EXPECT_EQ(inner, 40);
}

TEST(ThreadPool, TheFirstExceptionComesOutWhenAllHaveEnded) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> ended = 0;
      try {
        pool.run(20, [&](int i) {
          ++ended;
          if (i == 4 || i == 11 || i == 17) throw std::runtime_error(std::to_string(i));
        });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "4");
      }
      EXPECT_EQ(ended, 20);
    }
    int fine = 0;
    pool.run(1, [&](int) { ++fine; });
    EXPECT_EQ(fine, 1);
  }
}

TEST(ThreadPool, SeveralCallersShareIt) {
  ThreadPool pool(3);
  std::atomic<int> sum = 0;
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < 300; ++round) {
          std::vector<int> mine(7, 0);
          pool.run(7, [&](int i) { mine[static_cast<std::size_t>(i)] = 1; });
          for (const int one : mine) sum += one;
        }
      });
    }
  }
  EXPECT_EQ(sum, 4 * 300 * 7);
}

TEST(ThreadPool, ACallerNeedNotWaitForAnothersRun) {
  ThreadPool pool(2);
  std::atomic<bool> other_is_in = false;
  std::atomic<bool> go_on = false;
  std::jthread other([&] {
    pool.run(2, [&](int) {
      other_is_in = true;
      while (!go_on) std::this_thread::yield();
    });
  });
  while (!other_is_in) std::this_thread::yield();
  int mine = 0;
  pool.run(3, [&](int) { ++mine; });
  EXPECT_EQ(mine, 3);
  go_on = true;
}

TEST(ThreadPool, AForkedChildDoesItsTasksItself) {
  ThreadPool pool(3);
  pool.run(3, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a child that hangs is killed
    int done = 0;
    pool.run(9, [&](int) { ++done; });
    const bool right = done == 9 && pool.threads() == 1;
    pool.~ThreadPool();
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  std::atomic<int> there = 0;
  pool.run(3, [&](int) {
    ++there;
    while (there < 3) std::this_thread::yield();
  });
}

TEST(ThreadPool, TheNumberOfThreadsIsChecked) {
  for (const int threads : {-1, 0, 1025}) {
    try {
      ThreadPool::set_process_threads(threads);
      ADD_FAILURE() << threads;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()),
                "[ThreadPool::set_process_threads] threads must be from 1 to 1024, but got " + std::to_string(threads));
    }
    EXPECT_THROW(ThreadPool{threads}, Error);
  }
}

TEST(ThreadPool, TheProcessPoolChangesItsSizeWhileItIsUsed) {
  std::atomic<bool> stop = false;
  std::atomic<int> runs = 0;
  std::vector<std::jthread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&] {
      while (!stop) {
        std::atomic<int> done = 0;
        ThreadPool::process().run(10, [&](int) { ++done; });
        EXPECT_EQ(done, 10);
        ++runs;
      }
    });
  }
  for (int round = 0; round < 30; ++round) {
    const int seen = runs;
    ThreadPool::set_process_threads(1 + round % 4);
    EXPECT_EQ(ThreadPool::process().threads(), 1 + round % 4);
    while (runs < seen + 3) std::this_thread::yield();
  }
  stop = true;
}

// The process' pool is made once, so each value is read in a process of its own.
class ThreadPoolVariable : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  [[noreturn]] static void exit_with_threads(const char* value) {
    set_log_hook([](LogLevel, const std::string& message) { std::cerr << message << std::flush; });
    setenv("REPRISE_NUM_THREADS", value, 1);
    std::exit(ThreadPool::process().threads());
  }
};

using ThreadPoolVariableDeathTest = ThreadPoolVariable;

TEST_F(ThreadPoolVariableDeathTest, SaysHowManyThreads) {
  EXPECT_EXIT(exit_with_threads("3"), testing::ExitedWithCode(3), "^$");
}

TEST_P(ThreadPoolVariableDeathTest, ThatIsNoNumberOfThreadsIsReportedAndIgnored) {
  const int processors = internal::available_processors();
  EXPECT_EXIT(exit_with_threads(GetParam()), testing::ExitedWithCode(processors),
              std::string("REPRISE_NUM_THREADS must be a number from 1 to 1024, but got \"") + GetParam() +
                  "\": using " + std::to_string(processors));
}

INSTANTIATE_TEST_SUITE_P(Values, ThreadPoolVariableDeathTest,
                         testing::Values("", "0", "-2", "two", "2x", " 2", "1025", "99999999999999999999"));

}  // namespace
}  // namespace reprise
