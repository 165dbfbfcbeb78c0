// Chats whose layers forget or are quantised: past the window, back again, out to a file and in again.
#include <gtest/gtest.h>

#include <filesystem>

#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/chat_session.h"
#include "tests/generate/fake_model.h"

namespace reprise {
namespace {

constexpr int kSize = 16;

struct BoundedChat : testing::Test {
  test::Fake fake = test::make_fake();
  std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
  ChatOptions options{.generate = {.max_tokens = 7, .kv_cache = {.max_kv_size = kSize}}};

  void SetUp() override {
    std::filesystem::create_directories(folder);
    fake.model->head_size = 64;
    fake.model->next = [](int id, int position) {
      return position % 6 == 5 ? int{test::end_id} : (id + position) % 26;
    };
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  // The rows are the first four and the most recent ones of what is recorded.
  void expect_rows_fit_record(const ChatSession& session) {
    const Tokens& record = session.cache().tokens;
    EXPECT_EQ(session.cache().cache[0].position(), static_cast<int>(record.size()));
    const Tokens rows = test::stored_ids(session.cache());
    ASSERT_GE(rows.size(), std::min<std::size_t>(record.size(), kSize));
    EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + 4, record.begin()));
    EXPECT_TRUE(std::equal(rows.rbegin(), rows.rbegin() + kSize - 4, record.rbegin()));
  }
};

TEST_F(BoundedChat, G8TheChatGoesOnPastTheWindowAndKeepsItsFirstTokens) {
  ChatSession session(fake.loaded, options);
  ChatSession unbounded(fake.loaded, {.generate = {.max_tokens = 7}});
  GenerateResult before = session.say("hello");
  unbounded.say("hello");
  for (const char* text : {"how are you", "and you", "a rather long message it is", "b", "bye"}) {
    const auto turn = session.say(text);
    EXPECT_GE(turn.stats.cached_tokens, before.stats.prompt_tokens + before.stats.completion_tokens - 1);
    EXPECT_EQ(turn.tokens, unbounded.say(text).tokens) << "this model looks at position and last token only";
    expect_rows_fit_record(session);
    before = turn;
  }
  EXPECT_GT(session.cache().tokens.size(), 3u * kSize);
  EXPECT_EQ(session.messages(), unbounded.messages());
  EXPECT_EQ(session.cache().cache[0].class_name(), "RotatingKVCache");
}

TEST_F(BoundedChat, G7UndoPastTheWindowGoesBackToASnapshotNotToTheStart) {
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today", "fine"}) session.say(text);
  const auto answer = session.say("again");
  const Tokens rows = test::stored_ids(session.cache());
  EXPECT_EQ(session.undo(), "again");
  const auto repeated = session.say("again");
  EXPECT_EQ(repeated.stats.cached_tokens, repeated.stats.prompt_tokens - 1);
  EXPECT_EQ(repeated.tokens, answer.tokens);
  EXPECT_EQ(test::stored_ids(session.cache()), rows);

  session.undo();
  const auto other = session.say("something else");
  EXPECT_GT(other.stats.cached_tokens, kSize) << "from the end of the turn before";
  EXPECT_LT(other.stats.cached_tokens, other.stats.prompt_tokens - 1);
  expect_rows_fit_record(session);
  session.undo();
  session.undo();
  const auto earlier = session.say("yet another");
  EXPECT_GT(earlier.stats.cached_tokens, 0);
  expect_rows_fit_record(session);
}

TEST_F(BoundedChat, G7UndoGoesBackBehindTheTokenThatQuantisedTheWindow) {
  ChatSession dense(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today"}) dense.say(text);
  auto& kv_cache = options.generate.kv_cache;
  kv_cache.kv_bits = 8;
  kv_cache.quantized_kv_start = static_cast<int>(dense.cache().tokens.size()) + 1;
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today"}) session.say(text);
  ASSERT_EQ(session.cache().cache[0].class_name(), "RotatingKVCache");
  const auto crossing = session.say("fine");
  ASSERT_EQ(session.cache().cache[0].class_name(), "QuantizedRotatingKVCache");
  session.undo();
  const auto other = session.say("well, not so");
  EXPECT_EQ(other.stats.cached_tokens, crossing.stats.cached_tokens);
  EXPECT_EQ(session.cache().cache[0].class_name(), "QuantizedRotatingKVCache");
}

TEST_F(BoundedChat, G7WithoutASnapshotThePromptIsProcessedAgainAndNothingIsLost) {
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today", "fine"}) session.say(text);
  session.set_system_prompt("be brief");
  EXPECT_TRUE(session.cache().tokens.empty());
  ChatSession restored(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today", "fine"}) restored.say(text);
  restored.load(restored.save(folder / "chat"));
  restored.undo();
  const auto turn = restored.say("other");  // snapshots are not in the file
  EXPECT_EQ(turn.stats.cached_tokens, 0);
  expect_rows_fit_record(restored);
}

TEST_F(BoundedChat, G7ATemplateThatRewritesThePastGoesBackToWhereItDiverges) {
  test::Fake trimming = test::make_fake(
      "<s>{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}");
  trimming.model->next = [](int id, int) {
    return id == test::assistant_id ? int{test::space_id} : id == test::space_id ? 1 : id == 1 ? 2 : int{test::end_id};
  };
  ChatSession session(trimming.loaded, options);
  session.say("a long message to begin with");
  const auto second = session.say("and another");
  const auto third = session.say("d");
  EXPECT_GE(third.stats.cached_tokens, second.stats.prompt_tokens - 1);
  const auto ids = trimming.loaded.tokenizer.encode(
      "<s><user>a long message to begin with<end><assistant>bc<end><user>and another<end><assistant>bc<end>"
      "<user>d<end><assistant>");
  ASSERT_EQ(third.stats.prompt_tokens, static_cast<int>(ids.size()));
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), session.cache().tokens.begin()));
  expect_rows_fit_record(session);
}

TEST_F(BoundedChat, G5ResetAndForkAreIndependent) {
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today"}) session.say(text);
  ChatSession fork = session.fork();
  fork.undo();
  fork.say("or else");
  expect_rows_fit_record(fork);
  expect_rows_fit_record(session);
  session.reset();
  ChatSession fresh(fake.loaded, options);
  EXPECT_EQ(session.say("hello there").tokens, fresh.say("hello there").tokens);
  EXPECT_EQ(test::stored_ids(session.cache()), test::stored_ids(fresh.cache()));
}

TEST_F(BoundedChat, G7AForkGoesBackBehindTheForkAsTheOriginalDoes) {
  fake.model->row_weight = 20.0f;  // the answers depend on all rows
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today", "fine", "good"}) session.say(text);
  ChatSession fork = session.fork();
  const auto undo_and_say = [&](ChatSession& of, int turns) {
    for (int i = 0; i < turns; ++i) of.undo();
    const int before = fake.model->tokens_processed;
    const auto turn = of.say("or something else");
    EXPECT_GT(turn.stats.cached_tokens, 0);
    expect_rows_fit_record(of);
    return std::make_tuple(fake.model->tokens_processed - before, turn.stats.cached_tokens, turn.tokens,
                           test::stored_ids(of.cache()));
  };
  for (const int turns : {1, 2}) {
    // The fork goes first: what it does leaves the original's points where they are.
    const auto forked = undo_and_say(fork, turns);
    EXPECT_EQ(forked, undo_and_say(session, turns)) << turns;
  }
}

TEST_F(BoundedChat, G9ATurnCutShortPastTheWindowStaysConsistent) {
  ChatSession session(fake.loaded, options);
  for (const char* text : {"hello there", "how are you today"}) session.say(text);
  std::stop_source stop;
  stop.request_stop();
  session.say("never", {.cancel = stop.get_token()});
  EXPECT_EQ(session.messages().size(), 4u);
  std::stop_source later;
  session.say("cut", {.cancel = later.get_token(), .on_text = [&](std::string_view) { later.request_stop(); }});
  expect_rows_fit_record(session);
  int calls = 0;
  fake.model->before_layer = [&](int layer, int) {
    if (layer == 1 && ++calls == 2) throw std::runtime_error("planted");
  };
  EXPECT_THROW(session.say("fails"), Error);
  fake.model->before_layer = [](int, int) {};
  EXPECT_GT(session.say("goes on").stats.cached_tokens, kSize);
  expect_rows_fit_record(session);
}

TEST_F(BoundedChat, G12ARestoredChatKeepsItsOptionsAndGoesOn) {
  for (const KVCacheOptions& kv : {KVCacheOptions{.max_kv_size = kSize},
                                   KVCacheOptions{.max_kv_size = kSize, .kv_bits = 8, .quantized_kv_start = 20},
                                   KVCacheOptions{.kv_bits = 8, .quantized_kv_start = 0},
                                   KVCacheOptions{.kv_bits = 4, .kv_group_size = 32, .quantized_kv_start = 20}}) {
    ChatOptions own = options;
    own.generate.kv_cache = kv;
    ChatSession session(fake.loaded, own);
    session.say("hello there");
    session.say("how are you");
    ChatSession restored(fake.loaded, {.generate = {.max_tokens = 7}});
    restored.load(session.save(folder / "chat"));
    EXPECT_EQ(restored.options().generate.kv_cache, kv);
    EXPECT_EQ(restored.cache().pieces, session.cache().pieces);
    const auto straight = session.say("and now");
    const auto after_stop = restored.say("and now");
    EXPECT_EQ(after_stop.tokens, straight.tokens);
    EXPECT_EQ(after_stop.stats.cached_tokens, straight.stats.cached_tokens);
    EXPECT_EQ(test::stored_ids(restored.cache()), test::stored_ids(session.cache()));
    for (std::size_t i = 0; i < test::kLayers; ++i) {
      EXPECT_EQ(restored.cache().cache[i].class_name(), session.cache().cache[i].class_name());
    }
    restored.reset();
    session.reset();
    EXPECT_EQ(restored.say("x").tokens, session.say("x").tokens);
    EXPECT_EQ(restored.cache().cache[0].class_name(), session.cache().cache[0].class_name());
  }
}

TEST_F(BoundedChat, G12LayersThatTheOptionsCannotMakeAreRefusedAndTheSessionStays) {
  ChatSession session(fake.loaded, options);
  session.say("hello there");
  session.say("how are you");
  const auto path = session.save(folder / "chat");
  const auto record = session.cache().tokens;
  const auto expect_refused = [&](const std::string& from, const std::string& to) {
    LoadedPromptCache loaded = load_prompt_cache_file(path);
    auto& app = loaded.extension.app_json;
    const auto at = app.find(from);
    ASSERT_NE(at, std::string::npos) << from << " is not in " << app;
    app.replace(at, from.size(), to);
    const auto edited =
        save_prompt_cache((folder / "edited").string(), loaded.cache, {}, {.extension = loaded.extension});
    EXPECT_THROW(session.load(edited), Error) << to;
    EXPECT_EQ(session.cache().tokens, record);
    EXPECT_EQ(session.options().generate.kv_cache.max_kv_size, kSize);
  };
  expect_refused("\"max_kv_size\":16", "\"max_kv_size\":17");
  expect_refused("\"max_kv_size\":16", "\"max_kv_size\":4");
  expect_refused("\"max_kv_size\":16", "\"max_kv_size\":null");
  expect_refused("\"kv_bits\":null", "\"kv_bits\":7");
  expect_refused("\"kv_group_size\":64", "\"kv_group_size\":\"64\"");
  expect_refused("\"kv_cache\":{", "\"kv_cache\":3,\"was\":{");
  expect_refused("\"pieces\":[", "\"pieces\":[0,");
  expect_refused("\"pieces\":[", "\"pieces\":[100000,");
}

TEST_F(BoundedChat, G4OptionsThatCannotWorkAreRefusedWhenTheChatBegins) {
  fake.model->head_size = 48;
  EXPECT_THROW(ChatSession(fake.loaded, {.generate = {.kv_cache = {.kv_bits = 8}}}), Error);
  EXPECT_THROW(ChatSession(fake.loaded, {.generate = {.kv_cache = {.max_kv_size = 4}}}), Error);
  EXPECT_THROW(ChatSession(fake.loaded, {.generate = {.kv_cache = {.kv_bits = 7}}}), Error);
}

}  // namespace
}  // namespace reprise
