// Ten thousand steps of everything at once, against what each sequence gives alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "reprise/base/error.h"
#include "reprise/engine/scheduler.h"
#include "tests/engine/scheduler_run.h"

namespace reprise::test {
namespace {

struct Fate {
  Answer* answer = nullptr;
  int submitted_at = 0;
  bool cancelled = false;
};

void run_at_random(std::uint32_t seed, std::size_t budget, std::size_t state, int steps) {
  SCOPED_TRACE("seed " + std::to_string(seed) + " budget " + std::to_string(budget) + " state " +
               std::to_string(state));
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Trial run({.max_batch = draw(1, 8),
             .prefill_step_size = draw(5, 64),
             .checkpoint_every = draw(20, 90),
             .reserve_tokens = draw(1, 40),
             .aging = std::chrono::milliseconds(draw(0, 1) * 40)},
            budget, state);
  bool errors = true;
  const auto maybe_fail = [&] {
    if (errors && draw(0, 400) == 0) throw std::runtime_error("bad luck");
  };
  run.runner.before_start = [&](const SequenceStart&) { maybe_fail(); };
  run.runner.before_prefill = [&](std::span<const TokenId>) { maybe_fail(); };
  run.runner.before_row = [&](std::span<const TokenId>) { maybe_fail(); };

  std::vector<Fate> fates;
  std::size_t oldest = 0;  // of those that may still run
  for (int step = 0; step < steps; ++step) {
    const auto now = run.scheduler.stats();
    if (now.waiting < 6 && draw(0, 9) < 4) {
      Tokens prompt = prompt_of(draw(1, 5), draw(1, 150));
      if (draw(0, 1) == 1) prompt[static_cast<std::size_t>(draw(0, static_cast<int>(prompt.size()) - 1))] = 998;
      SequenceRequest request{.prompt = prompt,
                              .max_tokens = draw(0, 60),
                              .sampling = {.seed = static_cast<std::uint64_t>(draw(0, 3))},
                              .priority = draw(0, 2) == 0 ? draw(0, 3) : 0,
                              .salt = draw(0, 4) == 0 ? "salt" : "",
                              .keep = draw(0, 5) > 0,
                              .checkpoints = {draw(0, 200)}};
      try {
        fates.push_back({&run.submit(std::move(request)), step});
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
      }
    }
    if (oldest < fates.size() && draw(0, 60) == 0) {
      Fate& fate = fates[static_cast<std::size_t>(draw(static_cast<int>(oldest), static_cast<int>(fates.size()) - 1))];
      fate.cancelled = fate.cancelled || !fate.answer->end;
      run.scheduler.cancel(fate.answer->id);
      EXPECT_TRUE(fate.answer->end.has_value());
    }
    run.runner.whole_batch_throws = draw(0, 1) == 1;
    run.step();
    run.clock.advance(std::chrono::milliseconds(1));
    while (oldest < fates.size() && fates[oldest].answer->end) ++oldest;
    if (oldest < fates.size()) {
      ASSERT_LT(step - fates[oldest].submitted_at, 6000) << "starved";
    }
  }
  errors = false;
  run.finish();

  std::size_t failed = 0, cancelled = 0, set_aside = 0;
  for (const Fate& fate : fates) {
    const Answer& answer = *fate.answer;
    ASSERT_TRUE(answer.end.has_value());
    const Tokens whole = fake_answer(answer.prompt, answer.sampling, answer.max_tokens);
    ASSERT_LE(answer.tokens.size(), whole.size());
    EXPECT_TRUE(std::equal(answer.tokens.begin(), answer.tokens.end(), whole.begin()));
    EXPECT_EQ(answer.end->stats.completion_tokens, static_cast<int>(answer.tokens.size()));
    set_aside += static_cast<std::size_t>(answer.end->stats.times_set_aside);
    if (answer.end->error) {
      ++failed;
      EXPECT_THROW(std::rethrow_exception(answer.end->error), std::runtime_error);
      try {
        std::rethrow_exception(answer.end->error);
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      } catch (const std::exception&) {
      }
    } else if (fate.cancelled) {
      ++cancelled;
      EXPECT_EQ(answer.end->reason, FinishReason::cancelled);
    } else {
      EXPECT_EQ(answer.end->reason, FinishReason::length);
      EXPECT_EQ(answer.tokens, whole);
    }
  }
  const SchedulerStats& stats = run.scheduler.stats();
  EXPECT_EQ(stats.submitted, fates.size());
  EXPECT_EQ(stats.failed, failed);
  EXPECT_EQ(stats.cancelled, cancelled);
  EXPECT_EQ(stats.finished, fates.size() - failed - cancelled);
  EXPECT_EQ(stats.set_aside, set_aside);
  EXPECT_LE(stats.max_nbytes_seen, budget);
  EXPECT_GT(stats.finished, static_cast<std::uint64_t>(steps / 70));
}

TEST(SchedulerRandom, EverySequenceEndsOnceAsItWouldAlone) {
  const std::size_t budgets[] = {1400, 2000, 3500, 9000, std::size_t{1} << 40};
  std::uint32_t seed = 1;
  for (const std::size_t state : {std::size_t{0}, std::size_t{40}}) {
    for (const std::size_t budget : budgets) run_at_random(seed++, budget, state, 1000);
  }
}

TEST(SchedulerRandom, AlsoOverTenThousandSteps) {
  run_at_random(101, 2200, 0, 10000);
  run_at_random(102, 2500, 40, 10000);
}

}  // namespace
}  // namespace reprise::test
