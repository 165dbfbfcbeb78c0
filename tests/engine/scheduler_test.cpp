// The order in which sequences compute: pieces, batches, priorities, sharing, cancel, errors.
#include "reprise/engine/scheduler.h"

#include <gtest/gtest.h>

#include "reprise/base/error.h"
#include "tests/engine/scheduler_run.h"

namespace reprise::test {
namespace {

using Piece = FakeRunner::Piece;
using Pieces = std::vector<Piece>;

TEST(Scheduler, AnswersAsTheModelDoes) {
  Trial run;
  Answer& a = run.submit({.prompt = prompt_of(1, 10), .max_tokens = 5, .sampling = {.seed = 7}});
  Answer& b = run.submit({.prompt = prompt_of(2, 300), .max_tokens = 9});
  run.finish();
  EXPECT_EQ(a.tokens, fake_answer(prompt_of(1, 10), {.seed = 7}, 5));
  EXPECT_EQ(b.tokens, fake_answer(prompt_of(2, 300), {}, 9));
  EXPECT_EQ(a.end->reason, FinishReason::length);
  EXPECT_EQ(a.end->stats.prompt_tokens, 10);
  EXPECT_EQ(a.end->stats.cached_tokens, 0);
  EXPECT_EQ(a.end->stats.completion_tokens, 5);
  const SchedulerStats& stats = run.scheduler.stats();
  EXPECT_EQ(stats.submitted, 2u);
  EXPECT_EQ(stats.finished, 2u);
  EXPECT_EQ(stats.prompt_tokens, 310u);
  EXPECT_EQ(stats.prefilled_tokens, 308u);
  EXPECT_EQ(stats.completion_tokens, 14u);
  EXPECT_EQ(stats.waiting + stats.prefilling + stats.decoding, 0);
}

TEST(Scheduler, OnTokenEndsAnAnswer) {
  Trial run;
  const Tokens whole = fake_answer(prompt_of(1, 10), {}, 20);
  Answer& a = run.submit({.prompt = prompt_of(1, 10), .max_tokens = 20}, whole[3]);
  run.finish();
  EXPECT_EQ(a.end->reason, FinishReason::stop);
  EXPECT_EQ(a.tokens, Tokens(whole.begin(), whole.begin() + 4));
}

TEST(Scheduler, BadRequestsAreRefusedAtOnce) {
  Trial run({.max_waiting = 1}, 1000);
  EXPECT_THROW(run.submit({.prompt = {}}), Error);
  EXPECT_THROW(run.submit({.prompt = {1}, .max_tokens = -1}), Error);
  try {
    run.submit({.prompt = prompt_of(1, 100), .max_tokens = 61});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
    EXPECT_STREQ(error.what(),
                 "[Scheduler::submit] a prompt of 100 tokens and up to 61 new ones need 0.0 MiB of memory, but the "
                 "budget is 0.0 MiB: shorten the prompt, lower max_tokens, or raise the budget (--prompt-cache-bytes)");
  }
  EXPECT_THROW(run.submit({.prompt = prompt_of(1, 100), .max_tokens = 2147483647}), Error);
  run.submit({.prompt = prompt_of(1, 100), .max_tokens = 60});
  try {
    run.submit({.prompt = prompt_of(2, 10), .max_tokens = 1});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
  }
  EXPECT_EQ(run.scheduler.stats().refused, 5u);
  run.finish();
  EXPECT_EQ(run.scheduler.stats().finished, 1u);
}

TEST(Scheduler, OptionsOutOfRangeAreRefused) {
  FakeRunner runner;
  EXPECT_THROW(Scheduler(runner, {.max_batch = 0}), Error);
  EXPECT_THROW(Scheduler(runner, {.prefill_step_size = 0}), Error);
  EXPECT_THROW(Scheduler(runner, {.checkpoint_every = 0}), Error);
  EXPECT_THROW(Scheduler(runner, {.aging = std::chrono::milliseconds(-1)}), Error);
}

TEST(Scheduler, PiecesEndAtMultiplesOfTheStep) {
  Trial run({.prefill_step_size = 100});
  run.submit({.prompt = prompt_of(1, 251), .max_tokens = 1});
  run.finish();
  EXPECT_EQ(run.runner.pieces, (Pieces{{1, 0, 100, false}, {1, 100, 200, false}, {1, 200, 250, true}}));
  // From the middle of a page on it goes straight to the end, if that is near.
  run.runner.pieces.clear();
  Tokens longer = prompt_of(1, 310);
  longer[280] = 9;
  run.submit({.prompt = longer, .max_tokens = 1});
  run.finish();
  EXPECT_EQ(run.runner.pieces, (Pieces{{1, 251, 309, true}}));
}

TEST(Scheduler, CheckpointsCutPiecesOnlyWhereTheModelNeedsThem) {
  Trial plain({.prefill_step_size = 100, .checkpoint_every = 130});
  plain.submit({.prompt = prompt_of(1, 201), .max_tokens = 1, .checkpoints = {40}});
  plain.finish();
  EXPECT_EQ(plain.runner.pieces, (Pieces{{1, 0, 100, false}, {1, 100, 200, true}}));

  Trial recurrent({.prefill_step_size = 100, .checkpoint_every = 130}, std::size_t{1} << 40, 50);
  recurrent.submit({.prompt = prompt_of(1, 201), .max_tokens = 1, .checkpoints = {190, 40, 999, -3}});
  recurrent.finish();
  EXPECT_EQ(recurrent.runner.pieces,
            (Pieces{{1, 0, 40, true}, {1, 40, 130, true}, {1, 130, 190, true}, {1, 190, 200, true}}));
}

TEST(Scheduler, AShortPromptIsNotKeptWaitingByALongOne) {
  Trial run({.prefill_step_size = 10});
  run.submit({.prompt = prompt_of(1, 1001), .max_tokens = 1});
  for (int i = 0; i < 5; ++i) run.step();
  Answer& small = run.submit({.prompt = prompt_of(2, 21), .max_tokens = 3});
  run.runner.pieces.clear();
  for (int i = 0; i < 4; ++i) run.step();
  EXPECT_EQ(run.runner.pieces, (Pieces{{2, 0, 10, false}, {1, 50, 60, false}, {2, 10, 20, true}, {1, 60, 70, false}}));
  // It decodes while the long prompt goes on.
  for (int i = 0; i < 3; ++i) run.step();
  EXPECT_TRUE(small.end.has_value());
  run.finish();
}

TEST(Scheduler, EveryStepDecodesAllThatAreReadyAndPrefillsOnePiece) {
  Trial run({.prefill_step_size = 10});
  for (TokenId i = 1; i <= 3; ++i) run.submit({.prompt = {i}, .max_tokens = 4});
  run.submit({.prompt = prompt_of(4, 101), .max_tokens = 1});
  for (int i = 0; i < 4; ++i) run.step();
  EXPECT_EQ(run.runner.batches, (std::vector<Tokens>{{1, 2, 3}, {1, 2, 3}, {1, 2, 3}, {1, 2, 3}}));
  EXPECT_EQ(run.runner.pieces.size(), 4u);
  run.finish();
}

TEST(Scheduler, HigherPrioritiesGoFirst) {
  Trial run({.max_batch = 1});
  Answer& low = run.submit({.prompt = prompt_of(1, 50), .max_tokens = 3});
  Answer& high = run.submit({.prompt = prompt_of(2, 50), .max_tokens = 3, .priority = 2});
  Answer& middle = run.submit({.prompt = prompt_of(3, 50), .max_tokens = 3, .priority = 1});
  Answer& second = run.submit({.prompt = prompt_of(4, 50), .max_tokens = 3});
  run.finish();
  EXPECT_LT(high.order, middle.order);
  EXPECT_LT(middle.order, low.order);
  EXPECT_LT(low.order, second.order);
}

TEST(Scheduler, WaitingRaisesThePriority) {
  Trial run({.max_batch = 1, .aging = std::chrono::milliseconds(100)});
  Answer& low = run.submit({.prompt = prompt_of(1, 50), .max_tokens = 10});
  TokenId next = 10;
  for (int i = 0; i < 300 && !low.end; ++i) {
    if (run.scheduler.stats().waiting < 2)
      run.submit({.prompt = prompt_of(++next, 50), .max_tokens = 10, .priority = 3});
    run.step();
    run.clock.advance(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(low.end.has_value());
  EXPECT_GT(low.end->stats.queued, std::chrono::milliseconds(300));
  run.finish();
}

TEST(Scheduler, NoMoreThanMaxBatchRunAtATime) {
  Trial run({.max_batch = 3});
  for (TokenId i = 1; i <= 10; ++i) run.submit({.prompt = prompt_of(i, 20), .max_tokens = 5});
  while (run.step()) {
    EXPECT_LE(run.runner.live(), 3u);
    const SchedulerStats& stats = run.scheduler.stats();
    EXPECT_LE(stats.prefilling + stats.decoding, 3);
  }
  EXPECT_EQ(run.scheduler.stats().finished, 10u);
}

TEST(Scheduler, PromptsThatArriveTogetherAreComputedOnce) {
  for (const std::size_t state : {std::size_t{0}, std::size_t{50}}) {
    Trial run({.prefill_step_size = 64}, std::size_t{1} << 40, state);
    Tokens other = prompt_of(1, 500);
    other[420] = 9;
    Answer& a = run.submit({.prompt = prompt_of(1, 500), .max_tokens = 4});
    Answer& b = run.submit({.prompt = prompt_of(1, 500), .max_tokens = 4, .sampling = {.seed = 3}});
    run.step();
    Answer& c = run.submit({.prompt = other, .max_tokens = 4});
    Answer& stranger = run.submit({.prompt = prompt_of(1, 500), .max_tokens = 4, .salt = "other"});
    run.finish();
    // The prefill of one, what is new in the third, all of the stranger's, and the decode steps.
    EXPECT_EQ(run.runner.computed_tokens, 499 + (499 - 420) + 499 + 16) << state;
    EXPECT_EQ(a.end->stats.cached_tokens, 0);
    EXPECT_EQ(b.end->stats.cached_tokens, 499);
    EXPECT_EQ(c.end->stats.cached_tokens, 420);
    EXPECT_EQ(stranger.end->stats.cached_tokens, 0);
    EXPECT_EQ(c.tokens, fake_answer(other, {}, 4));
  }
}

TEST(Scheduler, AFollowerBeginsAsSoonAsItsPartIsStored) {
  Trial run({.prefill_step_size = 50});
  run.submit({.prompt = prompt_of(1, 1001), .max_tokens = 1});
  Tokens other = prompt_of(1, 130);
  other[120] = 9;
  run.submit({.prompt = other, .max_tokens = 1});
  for (int i = 0; i < 3; ++i) run.step();
  EXPECT_EQ(run.scheduler.stats().waiting, 1);
  run.step();
  EXPECT_EQ(run.scheduler.stats().waiting, 0);
  EXPECT_EQ(run.runner.pieces.back(), (Piece{1, 120, 129, true}));
  run.finish();
}

TEST(Scheduler, AFollowerGoesOnAloneWhenItsLeaderEnds) {
  Trial run({.prefill_step_size = 50});
  Answer& leader = run.submit({.prompt = prompt_of(1, 500), .max_tokens = 2});
  Answer& follower = run.submit({.prompt = prompt_of(1, 500), .max_tokens = 2});
  for (int i = 0; i < 3; ++i) run.step();
  run.scheduler.cancel(leader.id);
  EXPECT_EQ(leader.end->reason, FinishReason::cancelled);
  run.finish();
  EXPECT_EQ(follower.end->stats.cached_tokens, 150);
  EXPECT_EQ(follower.tokens, fake_answer(prompt_of(1, 500), {}, 2));
  EXPECT_EQ(run.runner.computed_tokens, 499 + 2);
}

TEST(Scheduler, WhoIsFollowedHasTheFollowersPriority) {
  Trial run({.prefill_step_size = 50});
  run.submit({.prompt = prompt_of(1, 500), .max_tokens = 1});
  run.step();
  run.submit({.prompt = prompt_of(2, 500), .max_tokens = 1, .priority = 1});
  run.submit({.prompt = prompt_of(1, 500), .max_tokens = 1, .priority = 2});
  run.runner.pieces.clear();
  run.step();
  EXPECT_EQ(run.runner.pieces, (Pieces{{1, 50, 100, false}}));
  run.finish();
}

TEST(Scheduler, NothingIsSharedWithWhoIsNotKept) {
  Trial run;
  run.submit({.prompt = prompt_of(1, 500), .max_tokens = 2, .keep = false});
  run.submit({.prompt = prompt_of(1, 500), .max_tokens = 2, .keep = false});
  run.finish();
  EXPECT_EQ(run.runner.computed_tokens, 2 * 501);
}

TEST(Scheduler, CancelEndsInEveryState) {
  Trial run({.max_batch = 2, .prefill_step_size = 50});
  Answer& decoding = run.submit({.prompt = prompt_of(1, 20), .max_tokens = 50});
  run.step();
  run.step();
  Answer& prefilling = run.submit({.prompt = prompt_of(2, 500), .max_tokens = 5});
  run.step();
  Answer& waiting = run.submit({.prompt = prompt_of(3, 20), .max_tokens = 5});
  run.step();
  EXPECT_EQ(run.scheduler.stats().decoding, 1);
  EXPECT_EQ(run.scheduler.stats().prefilling, 1);
  EXPECT_EQ(run.scheduler.stats().waiting, 1);
  for (const Answer* answer : {&waiting, &prefilling, &decoding}) {
    run.scheduler.cancel(answer->id);
    ASSERT_TRUE(answer->end.has_value());
    EXPECT_EQ(answer->end->reason, FinishReason::cancelled);
  }
  run.scheduler.cancel(decoding.id);
  run.scheduler.cancel(12345);
  EXPECT_TRUE(run.scheduler.idle());
  EXPECT_EQ(run.scheduler.stats().cancelled, 3u);
  // The work is kept.
  Answer& again = run.submit({.prompt = prompt_of(2, 500), .max_tokens = 1});
  run.finish();
  EXPECT_EQ(again.end->stats.cached_tokens, 100);
}

TEST(Scheduler, ErrorsEndTheirSequenceAlone) {
  for (const bool whole : {false, true}) {
    Trial run({.prefill_step_size = 50});
    const auto fail_for = [](TokenId first) {
      return [first](std::span<const TokenId> tokens) {
        if (tokens.front() == first) throw Error(ErrorCode::internal, "no");
      };
    };
    run.runner.before_start = [&](const SequenceStart& start) { fail_for(1)(start.tokens); };
    run.runner.before_prefill = fail_for(2);
    run.runner.before_row = [&](std::span<const TokenId> tokens) {
      if (tokens.size() >= 25) fail_for(3)(tokens);
    };
    run.runner.whole_batch_throws = whole;
    std::vector<Answer*> answers;
    for (TokenId i = 1; i <= 5; ++i) answers.push_back(&run.submit({.prompt = prompt_of(i, 20), .max_tokens = 10}));
    run.finish();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)]->end->error != nullptr, i < 3);
    EXPECT_EQ(answers[2]->tokens, fake_answer(prompt_of(3, 20), {}, 5));
    EXPECT_EQ(answers[3]->tokens, fake_answer(prompt_of(4, 20), {}, 10));
    EXPECT_EQ(run.scheduler.stats().failed, 3u);
    EXPECT_EQ(run.scheduler.stats().finished, 2u);
  }
}

TEST(Scheduler, MaxTokensZeroOnlyComputesThePrompt) {
  Trial run;
  Answer& a = run.submit({.prompt = prompt_of(1, 300), .max_tokens = 0});
  Answer& one = run.submit({.prompt = {5}, .max_tokens = 0});
  run.finish();
  EXPECT_EQ(a.end->reason, FinishReason::length);
  EXPECT_EQ(one.end->reason, FinishReason::length);
  EXPECT_TRUE(a.tokens.empty());
  EXPECT_EQ(run.runner.computed_tokens, 299);
  EXPECT_EQ(run.runner.reusable("", prompt_of(1, 300)), 299);
}

TEST(Scheduler, LooksAheadOnlyWhereTheRowsStay) {
  Trial run({.prefill_step_size = 50});
  run.submit({.prompt = prompt_of(1, 101), .max_tokens = 6});
  run.submit({.prompt = prompt_of(2, 40), .max_tokens = 9});
  run.submit({.prompt = prompt_of(3, 201), .max_tokens = 7});
  run.finish();
  EXPECT_GT(run.runner.look_aheads, 5);
  EXPECT_EQ(run.runner.wasted_look_aheads, 0);
}

TEST(Scheduler, ProgressTellsHowMuchOfThePromptIsThere) {
  Trial run({.prefill_step_size = 100});
  Answer& a = run.submit({.prompt = prompt_of(1, 250), .max_tokens = 2});
  run.finish();
  using Progress = std::vector<std::pair<int, int>>;
  EXPECT_EQ(a.progress, (Progress{{0, 250}, {100, 250}, {200, 250}, {249, 250}, {250, 250}}));
  Answer& b = run.submit({.prompt = prompt_of(1, 250), .max_tokens = 2});
  run.finish();
  EXPECT_EQ(b.progress, (Progress{{249, 250}, {250, 250}}));
}

TEST(Scheduler, TimesAreMeasuredFromSubmit) {
  Trial run({.max_batch = 1, .prefill_step_size = 100});
  const auto step = [&] {
    run.step();
    run.clock.advance(std::chrono::seconds(1));
  };
  run.submit({.prompt = {1}, .max_tokens = 2});
  Answer& b = run.submit({.prompt = prompt_of(2, 201), .max_tokens = 3});
  while (!b.end) step();
  EXPECT_EQ(b.end->stats.queued, std::chrono::seconds(2));
  EXPECT_EQ(b.end->stats.time_to_first_token, std::chrono::seconds(4));
  EXPECT_EQ(b.end->stats.decode_time, std::chrono::seconds(2));
}

TEST(Scheduler, GoingAwayEndsWhatIsThere) {
  FakeRunner runner;
  int ended = 0;
  {
    Scheduler scheduler(runner);
    const auto on_end = [&](const SequenceEnd& end) { ended += end.reason == FinishReason::cancelled ? 1 : 0; };
    scheduler.submit({.prompt = prompt_of(1, 1000), .on_end = on_end});
    scheduler.step();
    scheduler.submit({.prompt = prompt_of(2, 1000), .on_end = on_end});
  }
  EXPECT_EQ(ended, 2);
  EXPECT_EQ(runner.live(), 0u);
}

}  // namespace
}  // namespace reprise::test
