// What `reprise bench engine` replays and prints: the parts that need no model.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/reprise/bench_engine_report.h"
#include "apps/reprise/bench_trace.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "reprise/base/error.h"

namespace reprise::app {
namespace {

using Json = nlohmann::json;

// Every id once.
TextSource counting() {
  return [next = TokenId{0}](int count) mutable {
    Tokens tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(next++);
    return tokens;
  };
}

Trace made(const std::string& name, int conversations, std::uint64_t seed = 0, double scale = 1.0) {
  return make_trace(name, {.conversations = conversations, .seed = seed, .scale = scale, .answer = 64}, counting());
}

// The longest common prefix of two first prompts.
std::size_t shared(const TraceConversation& one, const TraceConversation& other) {
  const auto& a = one.turns.front().tokens;
  const auto& b = other.turns.front().tokens;
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

TEST(Percentile, IsTheNearestRank) {
  const std::vector<double> values = {15, 50, 35, 20, 40};
  EXPECT_EQ(percentile(values, 5), 15);
  EXPECT_EQ(percentile(values, 20), 15);
  EXPECT_EQ(percentile(values, 20.1), 20);
  EXPECT_EQ(percentile(values, 50), 35);
  EXPECT_EQ(percentile(values, 90), 50);
  EXPECT_EQ(percentile(values, 99), 50);
  EXPECT_EQ(percentile(values, 0), 15);
  EXPECT_EQ(percentile({7}, 50), 7);
  EXPECT_EQ(percentile({}, 50), 0);
}

TEST(MakeTrace, IsTheSameForTheSameSeedOnly) {
  for (const auto& name : trace_names()) {
    EXPECT_EQ(trace_lines(made(name, 6, 1)), trace_lines(made(name, 6, 1))) << name;
    EXPECT_NE(trace_lines(made(name, 6, 1)), trace_lines(made(name, 6, 2))) << name;
    EXPECT_EQ(made(name, 6).name, name);
    EXPECT_EQ(made(name, 6).conversations.size(), 6u) << name;
  }
}

TEST(MakeTrace, MultiTurnGoesOnFromTheTurnBefore) {
  for (const auto& conversation : made("multi-turn", 3).conversations) {
    ASSERT_EQ(conversation.turns.size(), 6u);
    for (int i = 0; i < 6; ++i) {
      const auto& turn = conversation.turns[static_cast<std::size_t>(i)];
      EXPECT_EQ(turn.after, i - 1);
      EXPECT_EQ(turn.max_tokens, 64);
      EXPECT_GE(turn.tokens.size(), 60u);
      EXPECT_LE(turn.tokens.size(), 180u);
    }
  }
}

TEST(MakeTrace, APrefixIsSharedByAllAndQuestionsAreNot) {
  const auto all = made("shared-prefix", 5).conversations;
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_EQ(shared(all[0], all[i]), 1500u);
}

TEST(MakeTrace, FiveForksShareOneHistory) {
  const auto all = made("fork", 11).conversations;
  for (std::size_t i = 1; i < all.size(); ++i) {
    EXPECT_EQ(shared(all[i - 1], all[i]), i % 5 == 0 ? 0u : 1000u) << i;
    EXPECT_EQ(all[i].turns.size(), 2u);
  }
}

TEST(MakeTrace, DocumentsAreAskedThreeTimesInAnyOrder) {
  const auto all = made("document", 12).conversations;
  std::map<TokenId, int> asked;
  int neighbours = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    ++asked[all[i].turns.front().tokens.front()];
    if (i > 0 && shared(all[i - 1], all[i]) == 3000) ++neighbours;
  }
  EXPECT_EQ(asked.size(), 4u);
  for (const auto& [document, times] : asked) EXPECT_EQ(times, 3) << document;
  EXPECT_LT(neighbours, 8) << "questions about a document all follow each other";
}

TEST(MakeTrace, AnEditGoesBackToAnEarlierTurn) {
  for (const auto& conversation : made("edit", 2).conversations) {
    ASSERT_EQ(conversation.turns.size(), 6u);
    EXPECT_EQ(conversation.turns[0].tokens.size(), 1000u);
    EXPECT_EQ(conversation.turns[4].after, 1);
    EXPECT_EQ(conversation.turns[5].after, 4);
  }
}

TEST(MakeTrace, LengthsAreScaledAndPromptsBegin) {
  const auto trace =
      make_trace("shared-prefix", {.conversations = 1, .scale = 0.01, .answer = 3, .beginning = {-7}}, counting());
  const auto& turn = trace.conversations.front().turns.front();
  EXPECT_EQ(turn.tokens.front(), -7);
  EXPECT_EQ(turn.max_tokens, 3);
  EXPECT_LE(turn.tokens.size(), 17u);
  EXPECT_THROW(made("something", 1), UsageError);
}

TEST(PromptOf, StandsBehindWhatItComesAfter) {
  const std::vector<Tokens> said = {{1, 2}, {1, 2, 3, 4}};
  EXPECT_EQ(prompt_of({.tokens = {9}, .after = -1}, said), (Tokens{9}));
  EXPECT_EQ(prompt_of({.tokens = {9}, .after = 0}, said), (Tokens{1, 2, 9}));
  EXPECT_EQ(prompt_of({.tokens = {9}, .after = 1}, said), (Tokens{1, 2, 3, 4, 9}));
}

TEST(Sentences, AreTextAndTheSameForTheSameSeed) {
  Sentences one(1), again(1), other(2);
  std::set<std::string> different;
  int equal = 0;
  for (int i = 0; i < 200; ++i) {
    const auto sentence = one.next();
    EXPECT_EQ(sentence, again.next());
    equal += sentence == other.next() ? 1 : 0;
    different.insert(sentence);
    EXPECT_TRUE(sentence[0] >= 'A' && sentence[0] <= 'Z') << sentence;
  }
  EXPECT_GT(different.size(), 190u);
  EXPECT_LT(equal, 3);
}

TEST(TraceLines, AreReadAsTheyWereWritten) {
  for (const auto& name : trace_names()) {
    const auto lines = trace_lines(made(name, 5, 3, 0.05));
    EXPECT_EQ(trace_lines(parse_trace(lines, nullptr, 1)), lines) << name;
  }
}

TEST(ParseTrace, TakesConversationsAsTheyCome) {
  const auto trace = parse_trace(R"({"conversation":"b","prompt_tokens":[1,2]}
{"conversation":7,"turn":0,"prompt_tokens":[3],"max_tokens":5,"at_ms":20.5}

{"conversation":"b","turn":1,"new_tokens":[4]}
{"conversation":"b","new_tokens":[5],"after":0}
{"conversation":"b","new_tokens":[6],"after":-1}
)",
                                 nullptr, 11);
  ASSERT_EQ(trace.conversations.size(), 2u);
  const auto& first = trace.conversations[0];
  EXPECT_EQ(first.id, "b");
  ASSERT_EQ(first.turns.size(), 4u);
  EXPECT_EQ(first.turns[0].tokens, (Tokens{1, 2}));
  EXPECT_EQ(first.turns[0].max_tokens, 11);
  EXPECT_EQ(first.turns[1].after, 0);
  EXPECT_EQ(first.turns[2].after, 0);
  EXPECT_EQ(first.turns[3].after, -1);
  EXPECT_EQ(trace.conversations[1].id, "7");
  EXPECT_EQ(trace.conversations[1].turns[0].max_tokens, 5);
  EXPECT_EQ(trace.conversations[1].turns[0].at_ms, 20.5);
}

TEST(ParseTrace, NamesTheLineThatIsWrong) {
  const char* bad[] = {
      R"([])",
      R"({"prompt_tokens":[1]})",
      R"({"conversation":"a"})",
      R"({"conversation":"a","prompt_tokens":[]})",
      R"({"conversation":"a","prompt_tokens":[-1]})",
      R"({"conversation":"a","prompt_tokens":[1.5]})",
      R"({"conversation":"a","prompt_tokens":[3000000000]})",
      R"({"conversation":"a","prompt_tokens":[1],"new_tokens":[1]})",
      R"({"conversation":"a","prompt_tokens":[1],"turn":1})",
      R"({"conversation":"a","prompt_tokens":[1],"max_tokens":0})",
      R"({"conversation":"a","prompt_tokens":[1],"at_ms":-1})",
      R"({"conversation":"a","prompt_tokens":[1],"after":-1})",
      R"({"conversation":"a","new_tokens":[1],"after":0})",
      R"({"conversation":"a","text":"needs a tokenizer"})",
  };
  for (const std::string line : bad) {
    try {
      parse_trace("\n" + line, nullptr, 1);
      ADD_FAILURE() << "was taken: " << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_data) << line;
      EXPECT_NE(std::string(error.what()).find("line 2: "), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(parse_trace("\n\n", nullptr, 1), Error);
}

EngineBenchReport small_report() {
  EngineBenchReport report;
  report.model = "m";
  report.trace = "fork";
  report.at_a_time = 2;
  RequestFigures one;
  one.conversation = "a";
  one.stats = {.prompt_tokens = 100, .cached_tokens = 60, .completion_tokens = 4, .times_set_aside = 1};
  one.first_token = 0.5;
  one.gaps = {0.1, 0.2, 0.3};
  RequestFigures failed = one;
  failed.error = "did not fit";
  report.figures = {.requests = {one, failed}, .seconds = 2.0};
  return report;
}

TEST(EngineBenchJson, SumsWhatDidNotFail) {
  auto report = small_report();
  const auto json = Json::parse(engine_bench_json(report));
  EXPECT_EQ(json["requests"], 2);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["prompt_tokens"], 100);
  EXPECT_EQ(json["cached_tokens"], 60);
  EXPECT_EQ(json["hit_rate"], 0.6);
  EXPECT_EQ(json["completion_tokens"], 4);
  EXPECT_EQ(json["completion_tps"], 2.0);
  EXPECT_EQ(json["prompt_tps"], 50.0);
  EXPECT_EQ(json["ttft_ms"]["p90"], 500.0);
  EXPECT_EQ(json["inter_token_ms"]["p50"], 200.0);
  EXPECT_EQ(json["inter_token_ms"]["p99"], 300.0);
  EXPECT_EQ(json["set_aside"], 1);
  EXPECT_FALSE(json.contains("each"));
  EXPECT_FALSE(json.contains("disk"));
  report.each_request = true;
  report.engine.prefix.disk = DiskTierStats{};
  const auto more = Json::parse(engine_bench_json(report));
  ASSERT_EQ(more["each"].size(), 2u);
  EXPECT_EQ(more["each"][0]["cached_tokens"], 60);
  EXPECT_FALSE(more["each"][0].contains("error"));
  EXPECT_EQ(more["each"][1]["error"], "did not fit");
  EXPECT_EQ(more["disk"]["writes"], 0);
}

TEST(EngineBenchText, TellsTheSame) {
  const auto text = engine_bench_text(small_report());
  EXPECT_NE(text.find("100 tokens, 50.0 tokens/s, 60.0 % of them from the cache"), std::string::npos) << text;
  EXPECT_NE(text.find("2 in 2.000 s, 1 failed"), std::string::npos) << text;
}

TEST(ParseBytes, KnowsUnitsAsMlxLmDoes) {
  EXPECT_EQ(parse_bytes("--b", "12"), 12u);
  EXPECT_EQ(parse_bytes("--b", "0"), 0u);
  EXPECT_EQ(parse_bytes("--b", "3k"), 3000u);
  EXPECT_EQ(parse_bytes("--b", "500M"), 500000000u);
  EXPECT_EQ(parse_bytes("--b", "1.5GB"), 1500000000u);
  for (const char* bad : {"", "B", "G", "-1", "1 G", "1T", "nan", "inf", "1e300G", "GG"}) {
    EXPECT_THROW(parse_bytes("--b", bad), UsageError) << bad;
  }
}

}  // namespace
}  // namespace reprise::app
