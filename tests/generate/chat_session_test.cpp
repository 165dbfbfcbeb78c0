#include "reprise/generate/chat_session.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/transcript.h"
#include "tests/generate/fake_model.h"

namespace reprise {
namespace {

struct ChatSessionTest : testing::Test {
  test::Fake fake = test::make_fake();
  std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();

  void SetUp() override {
    std::filesystem::create_directories(folder);
    // Ends an answer at every sixth position, so that answers have several lengths.
    fake.model->next = [](int id, int position) {
      return position % 6 == 5 ? int{test::end_id} : (id + position) % 26;
    };
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  // The cache must hold a prefix of the rendered conversation, row by row.
  void expect_cache_is_prefix_of_transcript(const ChatSession& session) {
    EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
    const std::string plain = fake.loaded.chat_template->render(session.messages(), {});
    Tokens rendered = fake.loaded.tokenizer.encode(plain);
    rendered.push_back(test::end_id);
    const Tokens& record = session.cache().tokens;
    ASSERT_LE(record.size(), rendered.size());
    EXPECT_TRUE(std::equal(record.begin(), record.end(), rendered.begin())) << plain;
  }
};

TEST_F(ChatSessionTest, G6EachTurnProcessesOnlyItsNewTokens) {
  ChatSession session(fake.loaded, {.system_prompt = "be kind"});
  GenerateResult before = session.say("hello");
  expect_cache_is_prefix_of_transcript(session);
  for (const char* text : {"how are you", "and you", "bye"}) {
    const auto turn = session.say(text);
    EXPECT_GE(turn.stats.cached_tokens, before.stats.prompt_tokens + before.stats.completion_tokens - 1);
    expect_cache_is_prefix_of_transcript(session);
    before = turn;
  }
}

TEST_F(ChatSessionTest, G7WarmAnswersEqualAColdRunOverTheSameIds) {
  ChatSession session(fake.loaded);
  session.say("one");
  session.say("two");
  const auto warm = session.say("three");
  std::vector<ChatMessage> messages = session.messages();
  messages.pop_back();
  RecordedCache cold{fake.loaded.model->make_cache(), {}};
  const auto ids =
      fake.loaded.tokenizer.encode(fake.loaded.chat_template->render(messages, {.add_generation_prompt = true}));
  EXPECT_EQ(static_cast<int>(ids.size()), warm.stats.prompt_tokens);
  EXPECT_EQ(generate(fake.loaded, ids, cold, {}).tokens, warm.tokens);
}

TEST_F(ChatSessionTest, G7ATemplateThatTrimsAnswersDivergesThereAndLosesNothing) {
  test::Fake trimming = test::make_fake(
      "<s>{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}");
  // Every answer begins with a space, which the template drops from then on.
  trimming.model->next = [](int id, int) {
    return id == test::assistant_id ? int{test::space_id} : id == test::space_id ? 1 : id == 1 ? 2 : int{test::end_id};
  };
  ChatSession session(trimming.loaded);
  EXPECT_EQ(session.say("a").text, " bc");
  const auto second = session.say("d");
  const auto ids = trimming.loaded.tokenizer.encode("<s><user>a<end><assistant>bc<end><user>d<end><assistant>");
  EXPECT_EQ(second.stats.prompt_tokens, static_cast<int>(ids.size()));
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), session.cache().tokens.begin()));
  EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
}

TEST_F(ChatSessionTest, G7GeneratedIdsWinOverReencodedText) {
  // "ab" as the ids [a, b]; the record keeps whatever ids made the text, here one that decodes to nothing.
  const auto ids = internal::transcript_ids(fake.loaded.tokenizer, *fake.loaded.chat_template,
                                            {{"user", "x"}, {"assistant", "ab"}, {"user", "y"}},
                                            {Tokens{0, 1, test::space_id}}, {.add_generation_prompt = true});
  const Tokens want = {test::bos_id, test::user_id, 23, test::end_id, test::assistant_id, 0, 1, test::space_id,
                       test::end_id, test::user_id, 24, test::end_id, test::assistant_id};
  EXPECT_EQ(ids, want);
}

TEST_F(ChatSessionTest, UndoAndTheSameQuestionGiveTheSameAnswerAlsoWhenSampling) {
  for (float temperature : {0.0f, 9.0f}) {
    ChatSession session(fake.loaded,
                        {.generate = {.max_tokens = 6, .sampling = {.temperature = temperature, .seed = 3}}});
    session.say("first");
    const auto answer = session.say("again");
    EXPECT_EQ(session.undo(), "again");
    EXPECT_EQ(session.messages().size(), 2u);
    const auto repeated = session.say("again");
    EXPECT_EQ(repeated.tokens, answer.tokens);
    EXPECT_EQ(repeated.stats.cached_tokens, repeated.stats.prompt_tokens - 1) << "all but one token was cached";
  }
}

TEST_F(ChatSessionTest, UndoOfEverythingThenAnotherQuestionEqualsAFreshSession) {
  ChatSession session(fake.loaded);
  session.say("first");
  session.undo();
  EXPECT_FALSE(session.undo().has_value());
  ChatSession fresh(fake.loaded);
  EXPECT_EQ(session.say("other").tokens, fresh.say("other").tokens);
  expect_cache_is_prefix_of_transcript(session);
}

TEST_F(ChatSessionTest, G9ACancelledTurnStaysAsFarAsItCame) {
  fake.model->next = [](int, int) { return 3; };
  ChatSession session(fake.loaded, {.generate = {.max_tokens = 50}});
  std::stop_source stop;
  int pieces = 0;
  const auto cut = session.say("x", {.cancel = stop.get_token(), .on_text = [&](std::string_view) {
                                       if (++pieces == 4) stop.request_stop();
                                     }});
  EXPECT_EQ(cut.finish_reason, FinishReason::cancelled);
  EXPECT_EQ(cut.text, "dddd");
  EXPECT_EQ(session.messages().back().content, "dddd");
  expect_cache_is_prefix_of_transcript(session);
  EXPECT_GE(session.say("y").stats.cached_tokens, cut.stats.prompt_tokens + 3);
  EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
}

TEST_F(ChatSessionTest, G9ATurnCancelledBeforeItsFirstTokenLeavesTheTranscript) {
  ChatSession session(fake.loaded);
  session.say("a");
  std::stop_source stop;
  stop.request_stop();
  session.say("b", {.cancel = stop.get_token()});
  EXPECT_EQ(session.messages().size(), 2u);
  EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
}

TEST_F(ChatSessionTest, AFailingTurnLeavesTheTranscriptAndTheChatGoesOn) {
  ChatSession session(fake.loaded);
  session.say("a");
  int calls = 0;
  fake.model->before_layer = [&](int layer, int) {
    if (layer == 1 && ++calls == 3) throw std::runtime_error("planted");
  };
  EXPECT_THROW(session.say("bb"), Error);
  EXPECT_EQ(session.messages().size(), 2u);
  EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
  fake.model->before_layer = [](int, int) {};
  session.say("bb");
  expect_cache_is_prefix_of_transcript(session);
}

TEST_F(ChatSessionTest, ForkGoesItsOwnWay) {
  ChatSession session(fake.loaded);
  session.say("a");
  ChatSession fork = session.fork();
  fork.say("b");
  EXPECT_EQ(session.messages().size(), 2u);
  expect_cache_is_prefix_of_transcript(session);
  expect_cache_is_prefix_of_transcript(fork);
  ChatSession fresh(fake.loaded);
  fresh.say("a");
  EXPECT_EQ(session.say("c").tokens, fresh.say("c").tokens);
}

TEST_F(ChatSessionTest, G12ARestoredChatGoesOnAsIfItHadNeverStopped) {
  const ChatOptions options{.system_prompt = "sys",
                            .generate = {.max_tokens = 7, .sampling = {.temperature = 5.0f, .seed = 11}}};
  ChatSession session(fake.loaded, options);
  session.say("a");
  session.say("b");
  const auto path = session.save(folder / "chat");
  ChatSession restored(fake.loaded, {.generate = {.max_tokens = 7}});
  restored.say("something else");
  restored.load(path);
  EXPECT_EQ(restored.messages(), session.messages());
  EXPECT_EQ(restored.cache().tokens, session.cache().tokens);
  const auto straight = session.say("c");
  const auto after_stop = restored.say("c");
  EXPECT_EQ(after_stop.tokens, straight.tokens);
  EXPECT_EQ(after_stop.stats.cached_tokens, straight.stats.cached_tokens);
  EXPECT_EQ(restored.undo(), "c");
  EXPECT_EQ(restored.undo(), "b");
}

TEST_F(ChatSessionTest, G12AFileOfAnotherModelOrWithoutATranscriptLeavesTheSession) {
  ChatSession session(fake.loaded);
  session.say("a");
  const auto path = session.save(folder / "chat");
  const auto messages = session.messages();
  const auto record = session.cache().tokens;

  test::Fake other = test::make_fake();
  other.loaded.fingerprint = "fake-2";
  ChatSession stranger(other.loaded);
  EXPECT_THROW(stranger.load(path), Error);

  const auto bare = save_prompt_cache((folder / "bare").string(), session.cache().cache);
  for (const auto& file : {std::filesystem::path(bare), folder / "missing.safetensors"}) {
    EXPECT_THROW(session.load(file), Error);
    EXPECT_EQ(session.messages(), messages);
    EXPECT_EQ(session.cache().tokens, record);
    EXPECT_EQ(test::stored_ids(session.cache()), record);
  }
}

TEST_F(ChatSessionTest, G12ATranscriptThatDoesNotFitIsRefusedAndTheSessionStays) {
  ChatSession session(fake.loaded);
  session.say("a");
  const auto path = session.save(folder / "chat");
  const auto record = session.cache().tokens;
  const auto messages = session.messages();
  const auto expect_refused = [&](const std::string& from, const std::string& to) {
    LoadedPromptCache loaded = load_prompt_cache_file(path);
    auto& app = loaded.extension.app_json;
    const auto at = app.find(from);
    ASSERT_NE(at, std::string::npos) << from << " is not in " << app;
    app.replace(at, from.size(), to);
    const auto edited =
        save_prompt_cache((folder / "edited").string(), loaded.cache, {}, {.extension = loaded.extension});
    EXPECT_THROW(session.load(edited), Error) << to;
    EXPECT_EQ(session.messages(), messages);
    EXPECT_EQ(session.cache().tokens, record);
  };
  expect_refused("\"tools\":\"\"", "\"tools\":\"{\"");
  expect_refused("\"template_kwargs\":\"\"", "\"template_kwargs\":\"[]\"");
  expect_refused("\"content\":\"a\"", "\"content\":\"a\",\"extra\":\"{\"");
  expect_refused("\"logit_bias\":[]", "\"logit_bias\":[[99999999,1.0]]");
  expect_refused("\"logit_bias\":[]", "\"logit_bias\":{}");
  expect_refused("\"version\":1", "\"version\":0");
  expect_refused("\"version\":1", "\"version\":4294967297");
  expect_refused("\"version\":1", "\"version\":1.9");
  expect_refused("\"answers\":[[", "\"answers\":[[1.5,");
  expect_refused("\"answers\":[[", "\"answers\":[[4294967301,");
  expect_refused("\"answers\":[[", "\"answers\":[[-1,");
  expect_refused("\"answers\":[[", "\"answers\":[[3,");
  expect_refused("\"draws_before\":[0]", "\"draws_before\":[-1]");
  expect_refused("\"draws_before\":[0]", "\"draws_before\":[1000000]");
  expect_refused("\"top_k\":0", "\"top_k\":1099511627776");
  expect_refused("\"seed\":null", "\"seed\":1.5");
  expect_refused("\"messages\":[", "\"messages\":null,\"was\":[");
  expect_refused("\"role\":\"assistant\"", "\"role\":\"user\"");
}

TEST_F(ChatSessionTest, G12ACacheOfOtherShapesOrAnotherDtypeIsRefusedAndTheSessionStays) {
  namespace mx = mlx::core;
  ChatSession session(fake.loaded);
  session.say("a");
  const auto path = session.save(folder / "chat");
  const auto record = session.cache().tokens;
  const int L = static_cast<int>(record.size());
  for (const auto& rows : {mx::zeros({1, 1, L, 2}), mx::zeros({1, 2, L, 1}), mx::zeros({2, 1, L, 1}),
                           mx::zeros({1, 1, L, 1}, mx::float16)}) {
    LoadedPromptCache loaded = load_prompt_cache_file(path);
    for (std::size_t i = 0; i < loaded.cache.size(); ++i) {
      auto layer = std::make_unique<KVCache>();
      layer->update_and_fetch(rows, rows);
      loaded.cache.replace(i, std::move(layer));
    }
    const auto edited =
        save_prompt_cache((folder / "edited").string(), loaded.cache, {}, {.extension = loaded.extension});
    EXPECT_THROW(session.load(edited), Error);
    EXPECT_EQ(session.cache().tokens, record);
  }
  session.say("b");
}

TEST_F(ChatSessionTest, AnAnswerEndedByAStopStringStaysAsItWasShown) {
  fake.model->next = [](int id, int) { return id < 26 ? (id + 1) % 26 : 0; };
  ChatSession session(fake.loaded, {.generate = {.max_tokens = 20, .stop = {"de"}}});
  const auto first = session.say("x");
  EXPECT_EQ(first.text, "abc");
  EXPECT_EQ(session.messages().back().content, "abc");
  const auto second = session.say("y");
  const auto ids = fake.loaded.tokenizer.encode("<s><user>x<end><assistant>abc<end><user>y<end><assistant>");
  EXPECT_EQ(second.stats.prompt_tokens, static_cast<int>(ids.size()));
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), session.cache().tokens.begin()));
  EXPECT_EQ(test::stored_ids(session.cache()), session.cache().tokens);
  ChatSession restored(fake.loaded);
  restored.load(session.save(folder / "chat"));
  EXPECT_EQ(restored.messages(), session.messages());
}

TEST_F(ChatSessionTest, ACallFromWithinATurnIsRefusedAndTheTurnGoesOn) {
  ChatSession session(fake.loaded, {.generate = {.max_tokens = 4}});
  int refused = 0;
  const auto try_all = [&](std::string_view) {
    for (const auto& call : std::vector<std::function<void()>>{[&] { session.say("y"); }, [&] { session.undo(); },
                                                               [&] { session.reset(); }, [&] { (void)session.fork(); },
                                                               [&] { session.set_system_prompt({}); },
                                                               [&] { session.save(folder / "x"); }}) {
      try {
        call();
      } catch (const Error& error) {
        refused += error.code() == ErrorCode::failed_precondition;
      }
    }
  };
  session.say("x", {.on_text = try_all});
  EXPECT_GE(refused, 6);
  EXPECT_EQ(refused % 6, 0);
  session.say("z");
  EXPECT_EQ(session.messages().size(), 4u);
}

TEST_F(ChatSessionTest, SystemPromptChangesStartAfresh) {
  ChatSession session(fake.loaded, {.system_prompt = "one"});
  session.say("a");
  session.set_system_prompt("two");
  EXPECT_EQ(session.messages().size(), 1u);
  EXPECT_TRUE(session.cache().tokens.empty());
  session.set_system_prompt({});
  EXPECT_TRUE(session.messages().empty());
  session.say("b");
  expect_cache_is_prefix_of_transcript(session);
}

TEST_F(ChatSessionTest, AModelWithoutTemplateIsRefused) {
  fake.loaded.chat_template.reset();
  EXPECT_THROW(ChatSession{fake.loaded}, Error);
}

}  // namespace
}  // namespace reprise
