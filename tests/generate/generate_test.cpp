#include "reprise/generate/generate.h"

#include <gtest/gtest.h>

#include <limits>

#include "reprise/base/error.h"
#include "tests/generate/fake_model.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

struct GenerateTest : testing::Test {
  test::Fake fake = test::make_fake();
  RecordedCache cache{fake.loaded.model->make_cache(), {}};

  GenerateResult run(const Tokens& prompt, const GenerateOptions& options) {
    return generate(fake.loaded, prompt, cache, options);
  }
  // What greedy decoding must give after `last` at `position`.
  Tokens expected(int last, int position, int n) const {
    Tokens ids;
    for (int i = 0; i < n; ++i) ids.push_back(last = fake.model->next(last, position + i));
    return ids;
  }
  void expect_record_equals_rows() { EXPECT_EQ(test::stored_ids(cache), cache.tokens); }
};

TEST_F(GenerateTest, G1EveryChunkSizeGivesTheSameAnswerAndProgress) {
  const Tokens prompt = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  for (int step : {1, 5, 10, 11, 2048}) {
    cache = {fake.loaded.model->make_cache(), {}};
    std::vector<std::pair<int, int>> progress;
    const auto result =
        run(prompt, {.max_tokens = 6, .prefill_step_size = step, .on_progress = [&](int done, int total) {
                       progress.emplace_back(done, total);
                     }});
    EXPECT_EQ(result.tokens, expected(5, 10, 6));
    EXPECT_EQ(result.finish_reason, FinishReason::length);
    EXPECT_EQ(progress.front(), std::pair(0, 11));
    EXPECT_EQ(progress.back(), std::pair(11, 11));
    EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
    Tokens fed = prompt;
    fed.insert(fed.end(), result.tokens.begin(), result.tokens.end() - 1);
    EXPECT_EQ(cache.tokens, fed) << "the last token was sampled, not fed";
    expect_record_equals_rows();
  }
}

TEST_F(GenerateTest, G1BadArgumentsAreRefusedBeforeAnythingHappens) {
  EXPECT_THROW(run({}, {}), Error);
  EXPECT_THROW(run({1}, {.max_tokens = -1}), Error);
  EXPECT_THROW(run({1}, {.prefill_step_size = 0}), Error);
  EXPECT_THROW(run({1, test::vocab_size}, {}), Error);
  EXPECT_THROW(run({1, -1}, {}), Error);
  EXPECT_THROW(run({1}, {.stop = {""}}), Error);
  EXPECT_THROW(run({1}, {.sampling = {.top_p = 2.0f}}), Error);
  EXPECT_EQ(fake.model->tokens_processed, 0);
  EXPECT_TRUE(cache.tokens.empty());
}

TEST_F(GenerateTest, APromptThatLeavesTheModelsPositionsIsRefusedUnlessTheCacheIsBounded) {
  fake = test::make_fake(test::kPlainTemplate, 10);
  cache = {fake.loaded.model->make_cache(), {}};
  EXPECT_NO_THROW(run({1, 2, 3}, {.max_tokens = 2}));  // of which one is fed: 4 rows
  EXPECT_NO_THROW(run({4}, {.max_tokens = 5}));
  const auto before = cache.tokens;
  try {
    run({5}, {.max_tokens = 5});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("--max-kv-size"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("10 positions"), std::string::npos) << error.what();
  }
  EXPECT_THROW(run({5}, {.max_tokens = std::numeric_limits<int>::max()}), Error);
  EXPECT_THROW(prefill(*fake.loaded.model, Tokens(11, 1), cache), Error);
  EXPECT_EQ(cache.tokens, before);
  expect_record_equals_rows();
  EXPECT_NO_THROW(run({5}, {.max_tokens = 5, .kv_cache = {.max_kv_size = 8}}));
}

TEST_F(GenerateTest, G2MaxTokensZeroProcessesThePromptAndYieldsNothing) {
  const auto result = run({1, 2, 3}, {.max_tokens = 0});
  EXPECT_TRUE(result.tokens.empty());
  EXPECT_EQ(cache.tokens, (Tokens{1, 2, 3}));
  expect_record_equals_rows();
}

TEST_F(GenerateTest, G2AStopTokenEndsTheAnswerAndItsRowIsRecorded) {
  fake.model->next = [](int id, int position) { return position == 4 ? test::end_id : (id + 1) % 26; };
  const auto result = run({0, 1}, {.max_tokens = 20});
  EXPECT_EQ(result.finish_reason, FinishReason::stop);
  EXPECT_EQ(result.tokens, (Tokens{2, 3, 4, test::end_id}));
  EXPECT_EQ(result.text, "cde");
  EXPECT_EQ(result.stats.completion_tokens, 4);
  EXPECT_GE(cache.tokens.size(), 2u + 4u - 1u);
  expect_record_equals_rows();
}

TEST_F(GenerateTest, G2CancelAtEveryPointKeepsRecordAndRowsEqual) {
  const Tokens prompt = {1, 2, 3, 4, 5, 6, 7};
  for (int point = 0; point < 12; ++point) {
    cache = {fake.loaded.model->make_cache(), {}};
    std::stop_source stop;
    int events = 0;
    const auto count = [&] {
      if (events++ == point) stop.request_stop();
    };
    const auto result = run(prompt, {.max_tokens = 5,
                                     .prefill_step_size = 2,
                                     .cancel = stop.get_token(),
                                     .on_progress = [&](int, int) { count(); },
                                     .on_text = [&](std::string_view) { count(); }});
    if (stop.stop_requested() && result.tokens.size() < 5) {
      EXPECT_EQ(result.finish_reason, FinishReason::cancelled);
    }
    expect_record_equals_rows();
    // What was computed is right: going on from it gives what a cold run gives.
    Tokens whole = prompt;
    whole.insert(whole.end(), result.tokens.begin(), result.tokens.end());
    const Tokens rest(whole.begin() + static_cast<std::ptrdiff_t>(std::min(cache.tokens.size(), whole.size() - 1)),
                      whole.end());
    if (cache.tokens.size() < whole.size()) {
      EXPECT_EQ(run(rest, {.max_tokens = 3}).tokens, expected(whole.back(), static_cast<int>(whole.size()) - 1, 3))
          << point;
      expect_record_equals_rows();
    }
  }
}

TEST_F(GenerateTest, G2AnExceptionAnywhereKeepsRecordAndRowsEqual) {
  struct Planted {};
  for (int layer : {0, 1}) {
    // Two prefill chunks, the prompt's last token, four fed answers.
    for (int call = 0; call < 7; ++call) {
      cache = {fake.loaded.model->make_cache(), {}};
      int calls = 0;
      fake.model->before_layer = [&](int at, int) {
        if (at == layer && calls++ == call) throw Error(ErrorCode::resource_exhausted, "planted");
      };
      EXPECT_THROW(run({1, 2, 3, 4, 5}, {.max_tokens = 5, .prefill_step_size = 2}), Error) << layer << " " << call;
      expect_record_equals_rows();
      fake.model->before_layer = [](int, int) {};
    }
  }
  cache = {fake.loaded.model->make_cache(), {}};
  EXPECT_THROW(run({1, 2, 3}, {.on_text = [](std::string_view) { throw Planted(); }}), Planted) << "comes out as it is";
  EXPECT_GE(cache.tokens.size(), 3u) << "the prompt stays computed";
  expect_record_equals_rows();
}

TEST_F(GenerateTest, G2AnOutsideExceptionBecomesAnErrorOfOurs) {
  fake.model->before_layer = [](int, int) { throw std::bad_alloc(); };
  try {
    run({1, 2}, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::resource_exhausted);
  }
  fake.model->before_layer = [](int, int) { throw std::runtime_error("[matmul] planted"); };
  try {
    run({1, 2}, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_NE(std::string(error.what()).find("planted"), std::string::npos);
  }
}

TEST_F(GenerateTest, G3TwoCallsOverOneCacheEqualOneCallOverTheJoinedPrompt) {
  run({1, 2, 3}, {.max_tokens = 0});
  const auto second = run({4, 5}, {.max_tokens = 4});
  EXPECT_EQ(second.stats.cached_tokens, 3);
  EXPECT_EQ(second.stats.prompt_tokens, 5);
  const Tokens record = cache.tokens;
  cache = {fake.loaded.model->make_cache(), {}};
  const auto joined = run({1, 2, 3, 4, 5}, {.max_tokens = 4});
  EXPECT_EQ(second.tokens, joined.tokens);
  EXPECT_EQ(record, cache.tokens);
}

TEST_F(GenerateTest, StopStringsEndOnTextAcrossTokensAndAreNotPartOfIt) {
  fake.model->next = [](int id, int) { return (id + 1) % 26; };
  std::string streamed;
  const auto result =
      run({0}, {.max_tokens = 20, .stop = {"ef"}, .on_text = [&](std::string_view t) { streamed += t; }});
  EXPECT_EQ(result.text, "bcd");
  EXPECT_EQ(streamed, result.text);
  EXPECT_EQ(result.finish_reason, FinishReason::stop);
  expect_record_equals_rows();
}

TEST_F(GenerateTest, PenaltiesSeeThePromptAndTheCachedTokens) {
  // Without a penalty the model repeats one letter for ever.
  fake.model->next = [](int, int) { return 4; };
  EXPECT_EQ(run({1}, {.max_tokens = 3}).text, "eee");
  cache = {fake.loaded.model->make_cache(), {}};
  run({4}, {.max_tokens = 0});
  const auto result = run({1}, {.max_tokens = 1, .sampling = {.presence_penalty = 20.0f}});
  EXPECT_NE(result.text, "e") << "'e' is in the cached context";
}

TEST_F(GenerateTest, TheSameSeedAndDrawNumberGiveTheSameTokens) {
  const auto sampled = [&](std::uint64_t seed, std::uint64_t draws) {
    cache = {fake.loaded.model->make_cache(), {}};
    return run({1, 2}, {.max_tokens = 8, .sampling = {.temperature = 8.0f, .seed = seed}, .num_draws = draws}).tokens;
  };
  EXPECT_EQ(sampled(5, 0), sampled(5, 0));
  EXPECT_NE(sampled(5, 0), sampled(6, 0));
  EXPECT_NE(sampled(5, 0), sampled(5, 3));
}

TEST_F(GenerateTest, LogitsThatAreNoNumbersAreAnErrorNotAnAnswer) {
  fake.model->logit = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(run({1, 2}, {.max_tokens = 3}), Error);
  expect_record_equals_rows();
}

TEST_F(GenerateTest, IgnoreEosGoesOn) {
  fake.model->next = [](int, int) { return static_cast<int>(test::end_id); };
  EXPECT_EQ(run({1}, {.max_tokens = 4, .ignore_eos = true}).tokens.size(), 4u);
}

TEST_F(GenerateTest, Z6DecodeKeepsTheBuffersInPlaceBetweenGrowths) {
  const auto address = [&] {
    auto& layer = cache.cache.at<KVCache>(0);
    return layer.state().as_list()->at(0).as_array()->data<char>();
  };
  run({1, 2, 3}, {.max_tokens = 2});
  const char* before = address();
  for (int i = 0; i < 4; ++i) {
    run({4}, {.max_tokens = 50});
    EXPECT_EQ(address(), before) << "the pipelined steps must not copy the buffers";
  }
}

TEST_F(GenerateTest, Z6FiveThousandStepsLeaveNothingBehindButRows) {
  std::vector<std::size_t> active;
  run({1}, {.max_tokens = 5000, .ignore_eos = true, .on_text = [&](std::string_view) {
              active.push_back(mx::get_active_memory());
            }});
  ASSERT_EQ(cache.tokens.size(), 5000u);
  ASSERT_GT(active.size(), 4900u);
  const std::size_t rows = prompt_cache_nbytes(cache.cache);
  // While a buffer grows, the old and the new one are both alive.
  EXPECT_LE(*std::max_element(active.begin() + 100, active.end()), active[100] + 2 * rows + (64u << 10));
  expect_record_equals_rows();
}

TEST_F(GenerateTest, ForkIsIndependentOfItsOrigin) {
  run({1, 2, 3}, {.max_tokens = 0});
  RecordedCache fork = cache.fork();
  const auto answer = generate(fake.loaded, Tokens{9}, fork, {.max_tokens = 4});
  EXPECT_EQ(cache.tokens, (Tokens{1, 2, 3}));
  expect_record_equals_rows();
  EXPECT_EQ(answer.tokens, expected(9, 3, 4));
}

}  // namespace
}  // namespace reprise
