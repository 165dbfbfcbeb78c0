// Admission, reservation and setting aside under small budgets. A page of 16 tokens has 100 bytes.
#include <gtest/gtest.h>

#include "reprise/base/error.h"
#include "reprise/engine/scheduler.h"
#include "tests/engine/scheduler_run.h"

namespace reprise::test {
namespace {

TEST(SchedulerBudget, WhatJustFitsRuns) {
  for (const std::size_t state : {std::size_t{0}, std::size_t{30}}) {
    Trial run({.reserve_tokens = 16}, 1000 + state, state);
    Answer& a = run.submit({.prompt = prompt_of(1, 100), .max_tokens = 60});
    run.finish();
    EXPECT_EQ(a.tokens, fake_answer(prompt_of(1, 100), {}, 60)) << state;
    EXPECT_LE(a.end->stats.times_set_aside, state > 0 ? 1 : 0);
    // What is cached gives way, also when the next one begins with it.
    Answer& b = run.submit({.prompt = prompt_of(1, 120), .max_tokens = 40});
    Answer& c = run.submit({.prompt = prompt_of(2, 120), .max_tokens = 40});
    run.finish();
    EXPECT_EQ(b.tokens, fake_answer(prompt_of(1, 120), {}, 40)) << state;
    EXPECT_EQ(c.tokens, fake_answer(prompt_of(2, 120), {}, 40)) << state;
  }
}

TEST(SchedulerBudget, WhatDoesNotFitBesideOthersWaits) {
  Trial run({.reserve_tokens = 64}, 2000);
  run.submit({.prompt = prompt_of(1, 128), .max_tokens = 64});
  run.submit({.prompt = prompt_of(2, 128), .max_tokens = 64});
  run.step();
  EXPECT_EQ(run.scheduler.stats().waiting, 1);
  run.finish();
  EXPECT_EQ(run.scheduler.stats().set_aside, 0u);
  EXPECT_EQ(run.scheduler.stats().finished, 2u);
}

TEST(SchedulerBudget, SmallOnesDoNotPassABigOneThatWaits) {
  Trial run({.reserve_tokens = 16}, 2000);
  run.submit({.prompt = prompt_of(1, 160), .max_tokens = 100});
  run.step();
  Answer& big = run.submit({.prompt = prompt_of(2, 200), .max_tokens = 16});
  Answer& small = run.submit({.prompt = prompt_of(3, 16), .max_tokens = 2});
  Answer& urgent = run.submit({.prompt = prompt_of(4, 16), .max_tokens = 2, .priority = 1});
  run.finish();
  EXPECT_LT(urgent.order, big.order);
  EXPECT_TRUE(small.end.has_value());
  EXPECT_EQ(run.scheduler.stats().finished, 4u);
  // The big one was admitted before the small one: its prefill came first.
  const auto first_piece = [&](TokenId first) {
    return std::find_if(run.runner.pieces.begin(), run.runner.pieces.end(),
                        [&](const auto& piece) { return piece.first == first; });
  };
  EXPECT_LT(first_piece(2), first_piece(3));
}

TEST(SchedulerBudget, AnswersThatGrowSetTheYoungestAside) {
  for (const std::size_t state : {std::size_t{0}, std::size_t{30}}) {
    Trial run({.reserve_tokens = 16}, 2400, state);
    std::vector<Answer*> answers;
    for (TokenId i = 1; i <= 3; ++i) {
      answers.push_back(&run.submit(
          {.prompt = prompt_of(i, 64), .max_tokens = 150, .sampling = {.seed = static_cast<std::uint64_t>(i)}}));
    }
    run.finish();
    EXPECT_GT(run.scheduler.stats().set_aside, 0u) << state;
    EXPECT_EQ(answers[0]->end->stats.times_set_aside, 0) << state;
    EXPECT_GT(answers[2]->end->stats.times_set_aside, 0) << state;
    for (const Answer* answer : answers) {
      EXPECT_EQ(answer->tokens, fake_answer(answer->prompt, answer->sampling, 150)) << state;
      EXPECT_EQ(answer->end->reason, FinishReason::length);
      EXPECT_EQ(answer->end->error, nullptr);
    }
    // What it had computed was kept as far as it fitted, so not all of it was computed again.
    EXPECT_LT(run.runner.computed_tokens, 3 * 213 + 3 * 213) << state;
  }
}

TEST(SchedulerBudget, TheLowestPriorityIsSetAsideFirst) {
  Trial run({.reserve_tokens = 16, .aging = std::chrono::milliseconds(0)}, 2000);
  Answer& low = run.submit({.prompt = prompt_of(1, 64), .max_tokens = 100});
  run.step();
  Answer& high = run.submit({.prompt = prompt_of(2, 64), .max_tokens = 150, .priority = 1});
  run.finish();
  EXPECT_GT(low.end->stats.times_set_aside, 0);
  EXPECT_EQ(high.end->stats.times_set_aside, 0);
  EXPECT_EQ(low.tokens, fake_answer(low.prompt, {}, 100));
}

TEST(SchedulerBudget, WhatIsSharedIsCountedOnce) {
  // Four requests over one prefix of 30 pages: they run together in 40.
  Trial run({.max_batch = 4, .reserve_tokens = 16}, 4400);
  run.submit({.prompt = prompt_of(1, 480), .max_tokens = 0});
  run.finish();
  for (TokenId i = 0; i < 4; ++i) {
    Tokens prompt = prompt_of(1, 480);
    prompt.push_back(1000 + i);
    run.submit({.prompt = prompt, .max_tokens = 10});
  }
  run.step();
  EXPECT_EQ(run.scheduler.stats().waiting, 0);
  run.finish();
}

TEST(SchedulerBudget, PinsThatTakeAllEndARequestRatherThanKeepItWaiting) {
  Trial run({}, 1000);
  run.submit({.prompt = prompt_of(1, 100), .max_tokens = 1});
  run.finish();
  run.runner.pinned = true;
  Answer& a = run.submit({.prompt = prompt_of(2, 100), .max_tokens = 1});
  run.finish();
  ASSERT_TRUE(a.end->error);
  try {
    std::rethrow_exception(a.end->error);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    EXPECT_NE(std::string(error.what()).find("pinned"), std::string::npos);
  }
}

TEST(SchedulerBudget, PinsThatComeLaterEndItToo) {
  Trial run({.reserve_tokens = 16}, 1000);
  run.submit({.prompt = prompt_of(1, 80), .max_tokens = 1});
  run.finish();
  Answer& a = run.submit({.prompt = prompt_of(2, 40), .max_tokens = 100});
  for (int i = 0; i < 5; ++i) run.step();
  run.runner.pinned = true;
  run.finish();
  EXPECT_TRUE(a.end->error);
  EXPECT_EQ(a.end->stats.times_set_aside, 1);
}

}  // namespace
}  // namespace reprise::test
