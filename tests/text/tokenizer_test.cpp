#include "reprise/text/tokenizer.h"

#include <gtest/gtest.h>

#include <thread>

#include "reprise/base/error.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("[Tokenizer"), 0U) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::internal;
}

class TokenizerTest : public ::testing::Test {
 protected:
  json golden_ = testing::read_golden("byte_level.json");
  Tokenizer json_{testing::byte_level_json(golden_)};
  Tokenizer gguf_{testing::byte_level_gguf(golden_, "smollm")};
};

TEST_F(TokenizerTest, JsonAndGgufGiveTheSameIds) {
  for (const auto& text : golden_.at("texts")) {
    EXPECT_EQ(json_.encode(text.get<std::string>()), gguf_.encode(text.get<std::string>())) << text;
  }
}

TEST_F(TokenizerTest, DecodingUndoesEncoding) {
  for (const auto& text : golden_.at("texts")) {
    EXPECT_EQ(json_.decode(json_.encode(text.get<std::string>())), text.get<std::string>());
  }
}

TEST_F(TokenizerTest, SpecialTokensSpelledOutBecomeTheirIds) {
  const TokenId start = json_.token_to_id("<|start|>").value();
  const TokenId end = json_.token_to_id("<|end|>").value();
  const TokenId tool = json_.token_to_id("<tool>").value();
  for (const Tokenizer* tokenizer : {&json_, &gguf_}) {
    const Tokens ids = tokenizer->encode("<|start|><|end|><tool>");
    EXPECT_EQ(ids, (Tokens{start, end, tool}));
    EXPECT_TRUE(tokenizer->is_special(start));
    EXPECT_FALSE(tokenizer->is_special(tool));
    EXPECT_EQ(tokenizer->decode(ids), "<|start|><|end|><tool>");
    EXPECT_EQ(tokenizer->decode(ids, {.skip_special_tokens = true}), "<tool>");
  }
}

TEST_F(TokenizerTest, IdsAndSpellingsAnswerEachOther) {
  EXPECT_EQ(json_.vocab_size(), golden_.at("tokenizer").at("model").at("vocab").size());
  for (TokenId id = 0; id < static_cast<TokenId>(json_.vocab_size()); ++id) {
    EXPECT_EQ(json_.token_to_id(json_.id_to_token(id).value()), id);
  }
  for (const TokenId outside : {-1, static_cast<TokenId>(json_.vocab_size()), 1 << 30, INT32_MIN}) {
    EXPECT_FALSE(json_.id_to_token(outside));
    EXPECT_FALSE(json_.is_special(outside));
    EXPECT_EQ(json_.decode(Tokens{outside, json_.token_to_id("a").value(), outside}), "a");
  }
  EXPECT_FALSE(json_.token_to_id("no such token"));
  EXPECT_FALSE(json_.token_to_id("\xFF"));
}

TEST_F(TokenizerTest, TextThatIsNotUtf8IsRefused) {
  for (const char* text : {"\xFF", "ok \xC3", "\xED\xA0\x80", "\xC0\x80"}) {
    EXPECT_EQ(code_of([&] { json_.encode(text); }), ErrorCode::invalid_argument);
  }
  EXPECT_EQ(json_.decode(json_.encode(std::string_view("a\0b", 3))), std::string("a\0b", 3));
}

TEST_F(TokenizerTest, BosAndEosComeFromTheirIdsOrTheirTexts) {
  EXPECT_FALSE(json_.bos_token_id());
  EXPECT_TRUE(json_.eos_token_ids().empty());
  TokenizerData data = testing::byte_level_json(golden_);
  data.bos_token = "<|start|>";
  data.eos_token = "<|end|>";
  EXPECT_EQ(Tokenizer(data).bos_token_id(), json_.token_to_id("<|start|>"));
  EXPECT_EQ(Tokenizer(data).eos_token_ids(), Tokens{json_.token_to_id("<|end|>").value()});
  data.bos_token_id = 5;
  data.eos_token_ids = {6, 7};
  EXPECT_EQ(Tokenizer(data).bos_token_id(), 5);
  EXPECT_EQ(Tokenizer(data).eos_token_ids(), (Tokens{6, 7}));
}

TEST_F(TokenizerTest, BosIsAddedOnlyOnRequestAndOnlyWhereTheModelWantsIt) {
  TokenizerData data = testing::byte_level_gguf(golden_, "smollm");
  data.bos_token_id = gguf_.token_to_id("<|start|>");
  data.eos_token_ids = {gguf_.token_to_id("<|end|>").value()};
  const Tokens plain = Tokenizer(data).encode("hi");
  EXPECT_EQ(Tokenizer(data).encode("hi", {.add_special_tokens = true}), plain);
  data.gguf->add_bos_token = true;
  data.gguf->add_eos_token = true;
  Tokens wrapped = plain;
  wrapped.insert(wrapped.begin(), *data.bos_token_id);
  wrapped.push_back(data.eos_token_ids.front());
  EXPECT_EQ(Tokenizer(data).encode("hi", {.add_special_tokens = true}), wrapped);
  EXPECT_EQ(Tokenizer(data).encode("hi"), plain);
  data.gguf->pre = "llama-bpe";  // adds it unless the file says no
  data.gguf->add_eos_token = std::nullopt;
  data.gguf->add_bos_token = std::nullopt;
  EXPECT_EQ(Tokenizer(data).encode("hi", {.add_special_tokens = true}).front(), *data.bos_token_id);
  data.gguf->add_bos_token = false;
  EXPECT_NE(Tokenizer(data).encode("hi", {.add_special_tokens = true}).front(), *data.bos_token_id);
}

TEST_F(TokenizerTest, TruncationAndPaddingOfTheFileAreSwitchedOff) {
  json file = golden_.at("tokenizer");
  file["truncation"] = {{"direction", "Right"}, {"max_length", 2}, {"strategy", "LongestFirst"}, {"stride", 0}};
  file["padding"] = {{"strategy", {{"Fixed", 50}}},
                     {"direction", "Right"},
                     {"pad_to_multiple_of", nullptr},
                     {"pad_id", 0},
                     {"pad_type_id", 0},
                     {"pad_token", "<|end|>"}};
  TokenizerData data;
  data.tokenizer_json = file.dump();
  EXPECT_EQ(Tokenizer(data).encode("Hello, world!"), json_.encode("Hello, world!"));
}

TEST_F(TokenizerTest, FourThreadsGetTheIdsOfOne) {
  const std::string text = golden_.at("texts").dump();
  const Tokens wanted = json_.encode(text);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) wrong += json_.encode(text) != wanted || json_.decode(wanted) != text;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Tokenizer, UnknownGgufKindsAreNamed) {
  const json golden = testing::read_golden("byte_level.json");
  TokenizerData data = testing::byte_level_gguf(golden, "klingon-bpe");
  try {
    Tokenizer tokenizer(data);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("klingon-bpe"), std::string::npos);
  }
  data.gguf->model = "rwkv";
  try {
    Tokenizer tokenizer(data);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("rwkv"), std::string::npos);
  }
}

// A SentencePiece vocabulary without bytes; the first token is unknown, the second a special one.
TokenizerData scored_tokens(const std::vector<std::pair<std::string, float>>& tokens) {
  TokenizerData data;
  GgufTokenizerData& gguf = data.gguf.emplace();
  gguf.model = "llama";
  gguf.add_space_prefix = false;
  gguf.unknown_token_id = 0;
  gguf.tokens = {"<unk>", "<|user|>"};
  gguf.scores = {0.0F, 0.0F};
  gguf.token_types = {2, 3};
  for (const auto& [token, score] : tokens) {
    gguf.tokens.push_back(token);
    gguf.scores.push_back(score);
    gguf.token_types.push_back(1);
  }
  return data;
}

TEST(SentencePiece, OfEqualScoresTheLeftmostPairIsJoined) {
  const Tokenizer tokenizer(scored_tokens({{"a", -9}, {"b", -9}, {"ab", -1}, {"ba", -1}, {"bab", -0.5F}}));
  EXPECT_EQ(tokenizer.encode("bab"), (Tokens{6}));
  EXPECT_EQ(tokenizer.encode("aba"), (Tokens{4, 2}));
  EXPECT_EQ(tokenizer.encode("abab"), (Tokens{4, 4}));
}

TEST(SentencePiece, ABetterPairFurtherOnIsJoinedFirst) {
  const Tokenizer tokenizer(scored_tokens({{"a", -9}, {"b", -9}, {"c", -9}, {"ab", -2}, {"bc", -1}}));
  EXPECT_EQ(tokenizer.encode("abc"), (Tokens{2, 6}));
}

TEST(SentencePiece, ATokenMayHoldACharacterThatIsNoToken) {
  const Tokenizer tokenizer(scored_tokens({{"!", -9}, {"\u00e9!", -1}}));
  EXPECT_EQ(tokenizer.encode("\u00e9!"), (Tokens{3}));
  EXPECT_EQ(tokenizer.encode("\u00e9\u00e9!!"), (Tokens{0, 3, 2}));
}

TEST(SentencePiece, BlanksBehindASpecialTokenGoWhereTheModelSaysSo) {
  TokenizerData data = scored_tokens({{"\u2581", -1}, {"a", -2}, {"\n", -3}});
  EXPECT_EQ(Tokenizer(data).encode("<|user|>\n a"), (Tokens{1, 4, 2, 3}));
  data.gguf->strips_after_special = true;
  EXPECT_EQ(Tokenizer(data).encode("<|user|>\n a <unk> a"), (Tokens{1, 3, 2, 0, 2, 3}));
}

}  // namespace
}  // namespace reprise
