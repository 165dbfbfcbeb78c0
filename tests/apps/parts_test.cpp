// The parts of the program that need neither a model nor a terminal.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include "apps/reprise/cache_file_name.h"
#include "apps/reprise/chat_commands.h"
#include "apps/reprise/inspect_report.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "apps/reprise/prompt.h"
#include "apps/reprise/utf8.h"
#include "reprise/base/error.h"
#include "tests/apps/program.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Environment() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(ParseChatInput, TellsCommandsFromMessages) {
  struct Case {
    const char* line;
    ChatCommand command;
    const char* text;
  };
  const Case cases[] = {
      {"hello", ChatCommand::message, "hello"},
      {"  hello ", ChatCommand::message, "  hello "},
      {"", ChatCommand::nothing, ""},
      {" \t", ChatCommand::nothing, ""},
      {"h", ChatCommand::help, ""},
      {"r", ChatCommand::reset, ""},
      {"q", ChatCommand::quit, ""},
      {"q ", ChatCommand::quit, ""},
      {"quit", ChatCommand::message, "quit"},
      {"/quit", ChatCommand::quit, ""},
      {"/reset", ChatCommand::reset, ""},
      {"/undo  ", ChatCommand::undo, ""},
      {"/undo 2", ChatCommand::unknown, "/undo 2"},
      {"/system", ChatCommand::system, ""},
      {"/system  Be brief. ", ChatCommand::system, "Be brief."},
      {"/save a file.safetensors", ChatCommand::save, "a file.safetensors"},
      {"/load x", ChatCommand::load, "x"},
      {"/load", ChatCommand::load, ""},
      {"/nothing of ours", ChatCommand::unknown, "/nothing of ours"},
      {"/", ChatCommand::unknown, "/"},
      {"//usr/bin", ChatCommand::message, "/usr/bin"},
      {"line one\n/quit", ChatCommand::message, "line one\n/quit"},
  };
  for (const auto& expected : cases) {
    const auto input = parse_chat_input(expected.line);
    EXPECT_EQ(input.command, expected.command) << expected.line;
    EXPECT_EQ(input.text, expected.text) << expected.line;
  }
}

TEST(ChatHelp, NamesEveryCommand) {
  for (const char* name : {"/help", "/reset", "/undo", "/system", "/save", "/load", "/stats", "/quit"}) {
    EXPECT_NE(chat_help().find(name), std::string::npos) << name;
  }
}

TEST(IsValidUtf8, RefusesWhatIsNot) {
  for (const char* good : {"", "abc", "ä", "€", "😀", "\xF4\x8F\xBF\xBF"}) EXPECT_TRUE(is_valid_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xC3", "\xC3(", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                          "\xFF", "ok\xE2\x82"}) {
    EXPECT_FALSE(is_valid_utf8(bad)) << bad;
  }
}

TEST(ParseNumbers, TakeTheWholeTextOrRefuse) {
  EXPECT_EQ(parse_int("--n", "12", 0), 12);
  EXPECT_EQ(parse_int("--n", "+12", 0), 12);
  EXPECT_EQ(parse_int("--n", "-3", -5), -3);
  for (const char* bad : {"", " 1", "1 ", "1e3", "0x10", "+-1", "2147483648", "one"}) {
    EXPECT_THROW(parse_int("--n", bad, -10), UsageError) << bad;
  }
  EXPECT_FLOAT_EQ(parse_float("--x", "1e-3"), 1e-3f);
  EXPECT_FLOAT_EQ(parse_float("--x", ".5"), 0.5f);
  EXPECT_FLOAT_EQ(parse_float("--x", "-2"), -2.0f);
  for (const char* bad : {"", "nan", "-nan", "inf", "1e39", "1e999", "1,5", "0.5f"}) {
    EXPECT_THROW(parse_float("--x", bad), UsageError) << bad;
  }
  EXPECT_EQ(parse_seed("--seed", "18446744073709551615"), 18446744073709551615u);
  EXPECT_THROW(parse_seed("--seed", "-1"), UsageError);
}

TEST(ParseLogitBias, TakesAnObjectOfIds) {
  EXPECT_EQ(parse_logit_bias("--logit-bias", "{\"3\": 1.5, \"7\": -100}"),
            (std::map<TokenId, float>{{3, 1.5f}, {7, -100.0f}}));
  EXPECT_TRUE(parse_logit_bias("--logit-bias", "{}").empty());
}

TEST(CacheFileName, HasItsEndingOnce) {
  EXPECT_EQ(cache_file_name("/save", "a"), "a.safetensors");
  EXPECT_EQ(cache_file_name("/save", "d/a b.safetensors"), "d/a b.safetensors");
  EXPECT_EQ(cache_file_name("/save", "-.safetensors"), "-.safetensors");
  EXPECT_EQ(cache_file_name("/save", "-x"), "-x.safetensors");
}

TEST(CacheFileName, RefusesWhatNamesNoFile) {
  using namespace std::string_literals;
  for (const auto& name : {""s, "/"s, "."s, ".."s, "d/"s, "d/.."s, "-"s, ".safetensors"s, "d/.safetensors"s, "a\0b"s}) {
    EXPECT_THROW(cache_file_name("/save", name), UsageError) << name;
  }
}

TEST(PrepareStandardStreams, IgnoresSignalsThatAreErrorsOfWrite) {
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    const auto before = std::signal(signal, SIG_DFL);
    prepare_standard_streams();
    EXPECT_EQ(std::signal(signal, before), SIG_IGN) << signal;
  }
}

TEST(PromptRecord, ComesBackAsItWas) {
  const PromptRecord records[] = {
      {},
      {.text = "a\n\"ä\"", .plain = true},
      {.text = "x", .system_prompt = "", .tools_json = "[1]", .kwargs_json = "{\"a\":null}"},
      {.text = "x", .pieces = {256, 10, 1}, .quantized_kv_start = 0},
  };
  for (const auto& record : records) EXPECT_EQ(prompt_record_from_json(prompt_record_to_json(record)), record);
}

TEST(PromptRecord, IsNotReadFromAnythingElse) {
  for (const char* json :
       {"", "[", "[]", "{}", R"({"prompt":1})", R"({"prompt":{"text":"x"}})", R"({"prompt":{"text":"x","plain":1}})",
        R"({"prompt":{"plain":true}})", R"({"prompt":{"text":1,"plain":true}})"}) {
    EXPECT_EQ(prompt_record_from_json(json), std::nullopt) << json;
  }
}

TEST(PromptRecord, NumbersThatAreNoneAreLeftOut) {
  for (const char* pieces : {"1", "{}", "[0]", "[-1]", "[1.5]", "[\"1\"]", "[1, 2147483648]", "[1e30]", "[[1]]"}) {
    const auto record =
        prompt_record_from_json(R"({"prompt":{"text":"x","plain":true,"pieces":)" + std::string(pieces) + "}}");
    ASSERT_TRUE(record) << pieces;
    EXPECT_TRUE(record->pieces.empty()) << pieces;
  }
  for (const char* start : {"-1", "0.5", "null", "[]", "2147483648"}) {
    const auto record = prompt_record_from_json(R"({"prompt":{"text":"x","plain":true,"quantized_kv_start":)" +
                                                std::string(start) + "}}");
    ASSERT_TRUE(record) << start;
    EXPECT_FALSE(record->quantized_kv_start) << start;
  }
}

TEST(UnusedPlaceholder, OccursInNoText) {
  const auto first = unused_placeholder({});
  const auto second = unused_placeholder({"a", "b" + first});
  EXPECT_NE(first, second);
  EXPECT_EQ(unused_placeholder({second, first + second}).find(second), std::string::npos);
}

TEST(Str2bool, OnlyFalseAndFAreFalse) {
  for (const char* no : {"false", "False", "FALSE", "f", "F"}) EXPECT_FALSE(str2bool(no)) << no;
  for (const char* yes : {"true", "", "0", "no"}) EXPECT_TRUE(str2bool(yes)) << yes;
}

TEST(Unescape, TurnsNewlinesAndTabsOnly) { EXPECT_EQ(unescape("a\\nb\\tc\\\\d\\q\\"), "a\nb\tc\\\\d\\q\\"); }

TEST(OneLine, HasNoControlCharacters) { EXPECT_EQ(one_line("a\nb\r\n\tc\x1b[0m\n"), "a b c [0m"); }

TEST(Excerpt, NeverCutsACharacter) {
  const auto text = excerpt(std::string(71, 'a') + "ää");
  EXPECT_TRUE(is_valid_utf8(text)) << text;
  EXPECT_EQ(excerpt("short"), "\"short\"");
}

TEST(FormatBytes, ChoosesTheUnit) {
  EXPECT_EQ(format_bytes(999), "999 bytes");
  EXPECT_EQ(format_bytes(1000), "1.0 kB");
  EXPECT_EQ(format_bytes(84900000), "84.9 MB");
  EXPECT_EQ(format_bytes(999990000), "1.0 GB");
}

TEST(ResolveModel, FindsHubIdsInTheLocalCache) {
  const test::TemporaryFolder folder;
  const fs::path repository = fs::path(folder.file("hub")) / "models--org--name";
  fs::create_directories(repository / "snapshots" / "abc");
  fs::create_directories(repository / "snapshots" / "def");
  fs::create_directories(repository / "refs");
  const Environment cache("HF_HUB_CACHE", folder.file("hub"));
  EXPECT_THROW(resolve_model("org/name"), Error) << "two snapshots and no ref: which one is meant is unknown";
  std::ofstream(repository / "refs" / "main") << "def\n";
  EXPECT_EQ(resolve_model("org/name"), repository / "snapshots" / "def");
  try {
    resolve_model("org/other");
    ADD_FAILURE() << "found what is not there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_NE(std::string(error.what()).find("reprise pull org/other"), std::string::npos) << error.what();
  }
}

TEST(ResolveModel, TakesAPathAsItIs) {
  const test::TemporaryFolder folder;
  EXPECT_EQ(resolve_model(folder.file("")), folder.file(""));
  EXPECT_THROW(resolve_model(folder.file("nothing")), Error);
  EXPECT_THROW(resolve_model(""), Error);
}

TEST(ChooseModel, TheFlagWinsThenTheEnvironment) {
  const Environment fetched("REPRISE_FETCHED_MODEL", "fetched");
  {
    const Environment named("REPRISE_MODEL", "named");
    EXPECT_EQ(choose_model("flag"), "flag");
    EXPECT_EQ(choose_model({}), "named");
  }
  const Environment unnamed("REPRISE_MODEL", "");
  EXPECT_EQ(choose_model({}), "fetched");
}

TEST(StatsLine, IsOneLineOfJson) {
  GenerateStats stats;
  stats.prompt_tokens = 10;
  stats.cached_tokens = 4;
  EXPECT_EQ(stats_line(stats),
            "stats {\"prompt_tokens\":10,\"cached_tokens\":4,\"completion_tokens\":0,\"ttft_ms\":0.0,"
            "\"prefill_tps\":0.00,\"decode_tps\":0.00}");
  stats.reuse_checks = 2;
  stats.reuse_mismatches = 1;
  stats.reuse_error = 0.25;
  const std::string checks = ",\"reuse_checks\":2,\"reuse_mismatches\":1,\"reuse_error\":0.25}";
  EXPECT_TRUE(stats_line(stats).ends_with("\"decode_tps\":0.00" + checks)) << stats_line(stats);
}

}  // namespace
}  // namespace reprise::app
