// The engine's thread, queues and texts over a runner without a model.
#include "reprise/engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "reprise/base/error.h"
#include "tests/engine/fake_runner.h"
#include "tests/generate/fake_model.h"

namespace reprise::test {
namespace {

using std::chrono::milliseconds;
using Kind = GenerationEvent::Kind;

// An engine whose "model" says the alphabet over and over: 'a' follows 'z'.
struct Machine {
  explicit Machine(
      const std::function<void(FakeRunner&)>& prepare = [](FakeRunner&) {}, const EngineOptions& options = {},
      std::size_t budget = std::size_t{1} << 40)
      : fake(make_fake(kPlainTemplate, 5000)), engine(fake.loaded, options, [&] {
          auto made = std::make_unique<FakeRunner>(budget);
          made->model = [](std::span<const TokenId> tokens, const SamplingParams&, std::uint64_t) {
            return (tokens.back() + 1) % 26;
          };
          prepare(*made);
          return made;
        }) {}

  Fake fake;
  Engine engine;
};

// So that whoever cancels comes before the end.
void slow_down(FakeRunner& runner) {
  runner.before_row = [](std::span<const TokenId>) { std::this_thread::sleep_for(milliseconds(1)); };
}

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::internal;
}

TEST(Engine, AnswersWithTokensAndText) {
  Machine machine;
  const GenerationResult result = machine.engine.submit({.prompt = {0, 1}, .max_tokens = 5}).wait();
  EXPECT_EQ(result.tokens, (Tokens{2, 3, 4, 5, 6}));
  EXPECT_EQ(result.logprobs.size(), 5u);
  EXPECT_EQ(result.text, "cdefg");
  EXPECT_EQ(result.reason, FinishReason::length);
  EXPECT_EQ(result.stats.prompt_tokens, 2);
  EXPECT_EQ(result.stats.completion_tokens, 5);
}

TEST(Engine, EventsComeInOrderAndEndOnce) {
  Machine machine;
  Generation generation = machine.engine.submit({.prompt = Tokens(300, 3), .max_tokens = 2});
  std::vector<Kind> kinds;
  std::vector<int> done;
  while (const auto event = generation.next()) {
    kinds.push_back(event->kind);
    if (event->kind == Kind::progress) done.push_back(event->done);
  }
  EXPECT_EQ(kinds, (std::vector<Kind>{Kind::progress, Kind::progress, Kind::progress, Kind::progress, Kind::token,
                                      Kind::token, Kind::end}));
  EXPECT_EQ(done, (std::vector<int>{0, 256, 299, 300}));
  EXPECT_TRUE(generation.ended());
  EXPECT_EQ(generation.next(), std::nullopt);
  EXPECT_EQ(generation.next_for(milliseconds(1)), std::nullopt);
  EXPECT_EQ(generation.wait().text, "ef");
}

TEST(Engine, StopStringsAreFoundAcrossTokensAndAreNoPartOfTheText) {
  Machine machine;
  Generation generation = machine.engine.submit({.prompt = {0}, .max_tokens = 20, .stop = {"efg", "zz"}});
  std::string text;
  while (const auto event = generation.next()) {
    text += event->text;
    EXPECT_EQ(text.find('e'), std::string::npos);
  }
  const GenerationResult result = generation.wait();
  EXPECT_EQ(result.text, "bcd");
  EXPECT_EQ(text, "bcd");
  EXPECT_EQ(result.reason, FinishReason::stop);
  EXPECT_EQ(result.tokens.size(), 6u);
  // What only began as one comes at the end.
  EXPECT_EQ(machine.engine.submit({.prompt = {0}, .max_tokens = 5, .stop = {"fgh"}}).wait().text, "bcdef");
}

TEST(Engine, StopTokensEndTheAnswerUnlessIgnored) {
  const auto says_end = [](FakeRunner& runner) {
    runner.model = [](std::span<const TokenId> tokens, const SamplingParams&, std::uint64_t) {
      return tokens.size() == 4 ? TokenId{end_id} : TokenId{7};
    };
  };
  Machine machine(says_end);
  EXPECT_EQ(machine.engine.submit({.prompt = {0}, .max_tokens = 9}).wait().tokens, (Tokens{7, 7, 7, end_id}));
  EXPECT_EQ(machine.engine.submit({.prompt = {0}, .max_tokens = 9, .ignore_eos = true}).wait().tokens.size(), 9u);
  EXPECT_EQ(machine.engine.submit({.prompt = {0}, .max_tokens = 9, .stop_tokens = {7}}).wait().tokens, (Tokens{7}));
}

TEST(Engine, BadRequestsAreRefusedByTheCaller) {
  Machine machine([](FakeRunner&) {}, {}, 10000);
  const auto refused = [&](Request request) { return code_of([&] { machine.engine.submit(std::move(request)); }); };
  EXPECT_EQ(refused({.prompt = {}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {vocab_size}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {-1}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {1}, .max_tokens = -1}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {1}, .max_tokens = 5000}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {1}, .sampling = {.temperature = -1.0f}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {1}, .sampling = {.logit_bias = {{99, 1.0f}}}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = {1}, .stop = {""}}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused({.prompt = Tokens(2000, 1)}), ErrorCode::resource_exhausted);
  EXPECT_EQ(machine.engine.stats().scheduler.submitted, 0u);
}

TEST(Engine, CancelEndsAnAnswerFromAnyThread) {
  Machine machine(slow_down);
  Generation generation = machine.engine.submit({.prompt = {0}, .max_tokens = 4000});
  while (generation.next()->kind != Kind::token) {
  }
  std::thread([&] { generation.cancel(); }).join();
  EXPECT_EQ(generation.wait().reason, FinishReason::cancelled);
  generation.cancel();
  EXPECT_EQ(machine.engine.stats().scheduler.cancelled, 1u);
}

TEST(Engine, LettingGoCancels) {
  Machine machine(slow_down);
  { const Generation generation = machine.engine.submit({.prompt = {0}, .max_tokens = 4000}); }
  Generation other = machine.engine.submit({.prompt = {1}, .max_tokens = 4000});
  other = machine.engine.submit({.prompt = {2}, .max_tokens = 3});
  EXPECT_EQ(other.wait().text, "def");
  const EngineStats stats = machine.engine.stats();
  EXPECT_EQ(stats.scheduler.cancelled, 2u);
  EXPECT_EQ(stats.scheduler.waiting + stats.scheduler.prefilling + stats.scheduler.decoding, 0);
}

TEST(Engine, AFailureComesToItsRequestAlone) {
  Machine machine([](FakeRunner& runner) {
    runner.before_row = [](std::span<const TokenId> tokens) {
      if (tokens.front() == 3 && tokens.size() == 4) throw Error(ErrorCode::corrupt_data, "no numbers");
    };
  });
  Generation bad = machine.engine.submit({.prompt = {3}, .max_tokens = 50});
  Generation good = machine.engine.submit({.prompt = {4}, .max_tokens = 50});
  int tokens = 0;
  EXPECT_EQ(code_of([&] {
              while (const auto event = bad.next()) tokens += event->kind == Kind::token ? 1 : 0;
            }),
            ErrorCode::corrupt_data);
  EXPECT_EQ(tokens, 3);
  EXPECT_TRUE(bad.ended());
  EXPECT_EQ(bad.next(), std::nullopt);
  EXPECT_EQ(code_of([&] { bad.wait(); }), ErrorCode::corrupt_data);
  EXPECT_EQ(good.wait().tokens.size(), 50u);
}

TEST(Engine, AStepThatThrowsEndsRequestsAndNotTheEngine) {
  std::atomic<bool> breaks{false};
  Machine machine([&](FakeRunner& runner) {
    runner.before_prefill = [&](std::span<const TokenId>) {
      if (breaks) throw std::bad_alloc();
    };
    runner.before_tick = [&] {
      if (breaks) throw std::runtime_error("housekeeping");
    };
  });
  breaks = true;
  Generation bad = machine.engine.submit({.prompt = {1, 2, 3}, .max_tokens = 4});
  EXPECT_THROW(bad.wait(), std::bad_alloc);
  breaks = false;
  EXPECT_EQ(machine.engine.submit({.prompt = {1, 2, 3}, .max_tokens = 4}).wait().text, "efgh");
}

TEST(Engine, WhatTheRunnerCannotBeMadeOfIsThrownByTheConstructor) {
  const Fake fake = make_fake();
  const Engine::MakeRunner fails = []() -> std::unique_ptr<BatchRunner> {
    throw Error(ErrorCode::unsupported, "a GPU");
  };
  EXPECT_EQ(code_of([&] { Engine(fake.loaded, {}, fails); }), ErrorCode::unsupported);
  const Engine::MakeRunner works = [] { return std::make_unique<FakeRunner>(); };
  EXPECT_EQ(code_of([&] { Engine(fake.loaded, {.scheduler = {.max_batch = 0}}, works); }), ErrorCode::invalid_argument);
}

TEST(Engine, GoingAwayEndsWhatRuns) {
  std::vector<Generation> left;
  {
    Machine machine(slow_down);
    for (TokenId i = 0; i < 5; ++i) left.push_back(machine.engine.submit({.prompt = {i}, .max_tokens = 4000}));
    while (left[0].next()->kind != Kind::token) {
    }
  }
  for (Generation& generation : left) {
    EXPECT_EQ(generation.wait().reason, FinishReason::cancelled);
    generation.cancel();
  }
}

// Who submits while another thread destroys the engine must hear of it, and not wait for ever.
TEST(Engine, GoingAwayRefusesWhatComes) {
  std::promise<void> started, gate;
  const auto opened = gate.get_future().share();
  auto machine = std::make_unique<Machine>(
      [&](FakeRunner& runner) {
        runner.before_start = [&started, opened, first = true](const SequenceStart&) mutable {
          if (std::exchange(first, false)) started.set_value();
          opened.wait();
        };
      },
      EngineOptions{.scheduler = {.max_batch = 1, .max_waiting = 100000}});
  Engine& engine = machine->engine;
  Generation running = engine.submit({.prompt = {1}, .max_tokens = 1});
  started.get_future().wait();
  std::vector<Generation> taken;
  // Its thread is kept at the gate, so the engine is there until it opens.
  std::thread destroyer([&] { machine.reset(); });
  std::optional<ErrorCode> refused;
  for (int i = 0; i < 2000 && !refused; ++i) {
    try {
      taken.push_back(engine.submit({.prompt = {1}, .max_tokens = 1}));
      std::this_thread::sleep_for(milliseconds(1));
    } catch (const Error& error) {
      refused = error.code();
    }
  }
  EXPECT_EQ(refused, ErrorCode::failed_precondition);
  gate.set_value();
  destroyer.join();
  ASSERT_TRUE(refused);  // otherwise some would be waited for in vain
  for (Generation& generation : taken) EXPECT_EQ(generation.wait().reason, FinishReason::cancelled);
}

TEST(Engine, ASlowReaderKeepsNobodyWaiting) {
  Machine machine;
  Generation slow = machine.engine.submit({.prompt = {0}, .max_tokens = 3000});
  EXPECT_EQ(machine.engine.submit({.prompt = {1}, .max_tokens = 3500}).wait().tokens.size(), 3500u);
  EXPECT_EQ(slow.wait().tokens.size(), 3000u);
}

TEST(Engine, TooManyThatWaitAreRefused) {
  std::promise<void> gate;
  const auto opened = gate.get_future().share();
  Machine machine([&](FakeRunner& runner) { runner.before_start = [opened](const SequenceStart&) { opened.wait(); }; },
                  {.scheduler = {.max_batch = 1, .max_waiting = 3}});
  std::vector<Generation> generations;
  EXPECT_EQ(code_of([&] {
              for (int i = 0; i < 20; ++i)
                generations.push_back(machine.engine.submit({.prompt = {1}, .max_tokens = 1}));
            }),
            ErrorCode::resource_exhausted);
  EXPECT_GE(generations.size(), 3u);
  gate.set_value();
  for (Generation& generation : generations) EXPECT_EQ(generation.wait().text, "c");
}

TEST(Engine, AnotherRunnerHasNoPrefixCache) {
  Machine machine;
  EXPECT_EQ(code_of([&] { machine.engine.with_prefix_cache([](PrefixCache&) {}); }), ErrorCode::failed_precondition);
}

TEST(Engine, ManyThreadsSubmitReadAndCancel) {
  Machine machine([](FakeRunner&) {}, {.scheduler = {.max_batch = 5, .reserve_tokens = 16}}, 4000);
  std::atomic<int> finished{0}, cancelled{0}, tokens{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 40; ++i) {
        const int length = static_cast<int>(random() % 200 + 1);
        const int most = static_cast<int>(random() % 100 + 1);
        Generation generation = machine.engine.submit(
            {.prompt = Tokens(static_cast<std::size_t>(length), static_cast<TokenId>(random() % 3)),
             .max_tokens = most,
             .priority = static_cast<int>(random() % 3)});
        const auto fate = random() % 4;
        if (fate == 0) continue;  // let go
        if (fate == 1) generation.next_for(milliseconds(random() % 3));
        if (fate == 1) generation.cancel();
        const GenerationResult result = generation.wait();
        tokens += static_cast<int>(result.tokens.size());
        if (result.reason == FinishReason::cancelled) {
          ++cancelled;
        } else {
          EXPECT_EQ(static_cast<int>(result.tokens.size()), most);
          ++finished;
        }
      }
    });
  }
  std::thread watcher([&] {
    for (int i = 0; i < 50; ++i) machine.engine.stats();
  });
  for (std::thread& thread : threads) thread.join();
  watcher.join();
  const EngineStats stats = machine.engine.stats();
  EXPECT_EQ(stats.scheduler.submitted, 240u);
  EXPECT_EQ(stats.scheduler.finished + stats.scheduler.cancelled, 240u);
  EXPECT_EQ(stats.scheduler.failed, 0u);
  EXPECT_EQ(stats.scheduler.over_budget, 0u);
  EXPECT_GE(stats.scheduler.finished, static_cast<std::uint64_t>(finished));
  EXPECT_GT(finished, 60);
}

}  // namespace
}  // namespace reprise::test
