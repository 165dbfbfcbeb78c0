// A scheduler over a fake runner, and what became of each request.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "reprise/engine/scheduler.h"
#include "tests/engine/fake_runner.h"

namespace reprise::test {

// `first`, then tokens that follow from it: prompts of different `first` share nothing.
inline Tokens prompt_of(TokenId first, int length) {
  Tokens tokens{first};
  while (static_cast<int>(tokens.size()) < length) tokens.push_back((tokens.back() * 31 + first) % 997);
  return tokens;
}

struct Answer {
  SequenceId id = 0;
  Tokens prompt;
  SamplingParams sampling;
  int max_tokens = 0;
  Tokens tokens;
  std::vector<std::pair<int, int>> progress;
  std::optional<SequenceEnd> end;
  int order = 0;  // in which they ended
};

struct Trial {
  explicit Trial(const SchedulerOptions& options = {}, std::size_t budget = std::size_t{1} << 40, std::size_t state = 0)
      : runner(budget, state), scheduler(runner, options, clock) {}

  // `stop_at`: the answer ends with this token.
  Answer& submit(SequenceRequest request, std::optional<TokenId> stop_at = {}) {
    auto owned = std::make_unique<Answer>();
    Answer& answer = *owned;
    answer.prompt = request.prompt;
    answer.sampling = request.sampling;
    answer.max_tokens = request.max_tokens;
    request.on_token = [&answer, stop_at](TokenId token, float) {
      EXPECT_FALSE(answer.end.has_value());
      answer.tokens.push_back(token);
      return token == stop_at;
    };
    request.on_progress = [&answer](int done, int total) { answer.progress.emplace_back(done, total); };
    request.on_end = [this, &answer](const SequenceEnd& end) {
      EXPECT_FALSE(answer.end.has_value()) << "it ended twice";
      answer.end = end;
      answer.order = ++ended;
    };
    answer.id = scheduler.submit(std::move(request));
    answers.push_back(std::move(owned));
    return answer;
  }

  bool step() {
    const bool more = scheduler.step();
    EXPECT_LE(runner.nbytes(), runner.max_bytes());
    return more;
  }

  // Until all have ended.
  void finish() {
    int steps = 0;
    while (!scheduler.idle() && ++steps < 100000) step();
    EXPECT_TRUE(scheduler.idle()) << "it never ends";
    EXPECT_EQ(scheduler.stats().over_budget, 0u);
    EXPECT_EQ(runner.live(), 0u);
  }

  FakeClock clock;
  FakeRunner runner;
  std::vector<std::unique_ptr<Answer>> answers;
  int ended = 0;
  Scheduler scheduler;
};

}  // namespace reprise::test
