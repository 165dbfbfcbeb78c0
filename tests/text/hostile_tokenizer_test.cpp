// Tokenizer data that is damaged or made to do harm: one clear error, never a crash.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "reprise/base/error.h"
#include "reprise/text/detokenizer.h"
#include "reprise/text/tokenizer.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

void expect_corrupt(const TokenizerData& data, const std::string& what) {
  try {
    Tokenizer tokenizer(data);
    ADD_FAILURE() << what << ": nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt_data) << what << ": " << error.what();
  }
}

class HostileTokenizer : public ::testing::Test {
 protected:
  json golden_ = testing::read_golden("byte_level.json");
  json sentencepiece_ = testing::read_golden("sentencepiece.json");

  void damaged_gguf(const std::string& what, const std::function<void(TokenizerData&)>& damage) {
    TokenizerData data = testing::byte_level_gguf(golden_, "smollm");
    damage(data);
    expect_corrupt(data, what);
  }
};

TEST_F(HostileTokenizer, DamagedGgufFieldsAreRefused) {
  damaged_gguf("no tokens", [](TokenizerData& d) { d.gguf->tokens.clear(); });
  damaged_gguf("one spelling twice", [](TokenizerData& d) { d.gguf->tokens[9] = d.gguf->tokens[8]; });
  damaged_gguf("not UTF-8", [](TokenizerData& d) { d.gguf->tokens[9] = "\xFF\xFE"; });
  damaged_gguf("types for half", [](TokenizerData& d) { d.gguf->token_types.resize(5); });
  damaged_gguf("scores for half", [](TokenizerData& d) { d.gguf->scores = {1.0F}; });
  damaged_gguf("merge of one", [](TokenizerData& d) { d.gguf->merges[0] = "abc"; });
  damaged_gguf("empty merge", [](TokenizerData& d) { d.gguf->merges[0] = ""; });
  damaged_gguf("merge of unknown tokens", [](TokenizerData& d) { d.gguf->merges[0] = "nobody knows"; });
  damaged_gguf("merge that is not UTF-8", [](TokenizerData& d) { d.gguf->merges[0] = "\xFF \xFE"; });
  for (const TokenId outside : {-1, 1 << 20}) {
    damaged_gguf("BOS outside", [&](TokenizerData& d) {
      d.bos_token_id = outside;
      d.gguf->add_bos_token = true;
    });
    damaged_gguf("EOS outside", [&](TokenizerData& d) {
      d.eos_token_ids = {outside};
      d.gguf->add_eos_token = true;
    });
  }
}

TEST_F(HostileTokenizer, DamagedSentencePieceFieldsAreRefused) {
  TokenizerData data = testing::sentencepiece_gguf(sentencepiece_, true);
  data.gguf->scores[7] = std::nanf("");
  expect_corrupt(data, "score that is no number");
  data = testing::sentencepiece_gguf(sentencepiece_, true);
  data.gguf->scores.clear();
  expect_corrupt(data, "no scores");
  data = testing::sentencepiece_gguf(sentencepiece_, true);
  data.gguf->unknown_token_id = 100000;
  expect_corrupt(data, "unknown token outside");
}

TEST_F(HostileTokenizer, JsonThatIsNoTokenizerIsRefused) {
  for (const std::string& text : std::vector<std::string>{
           "{", "[]", "{}", "null", "\xFF", R"({"model":{"type":"BPE"}})", std::string(100000, '['),
           R"({"version":"1.0","added_tokens":[],"model":{"type":"Nothing"}})",
           R"({"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":4000000000},"merges":[]}})",
           R"({"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[["x","y"]]}})"}) {
    TokenizerData data;
    data.tokenizer_json = text;
    expect_corrupt(data, text.substr(0, 60));
  }
  TokenizerData none;
  EXPECT_THROW(Tokenizer{none}, Error);
}

TEST_F(HostileTokenizer, ADecoderThatCannotStreamIsRefusedByName) {
  json file = golden_.at("tokenizer");
  file["decoder"] = {{"type", "CTC"}, {"pad_token", "a"}, {"word_delimiter_token", "|"}, {"cleanup", true}};
  TokenizerData data;
  data.tokenizer_json = file.dump();
  try {
    Tokenizer tokenizer(data);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("CTC"), std::string::npos);
  }
}

// The post-processor names a special token that it does not define; the crate finds out only when it is used.
TEST_F(HostileTokenizer, APanicInsideTheLibraryIsAnErrorAndTheTokenizerLivesOn) {
  json file = golden_.at("tokenizer");
  const json single = json::parse(R"([{"SpecialToken":{"id":"<x>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}])");
  file["post_processor"] = {
      {"type", "TemplateProcessing"}, {"single", single}, {"pair", single}, {"special_tokens", json::object()}};
  TokenizerData data;
  data.tokenizer_json = file.dump();
  const Tokenizer tokenizer(data);
  const Tokens wanted = tokenizer.encode("b");
  try {
    tokenizer.encode("b", {.add_special_tokens = true});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal) << error.what();
    EXPECT_NE(std::string(error.what()).find("panic"), std::string::npos) << error.what();
  }
  EXPECT_EQ(tokenizer.encode("b"), wanted);
}

TEST_F(HostileTokenizer, DamagedBytesNeverCrash) {
  const std::string whole = golden_.at("tokenizer").dump();
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::string damaged = whole;
    const int hits = 1 + static_cast<int>(random() % 4);
    for (int hit = 0; hit < hits; ++hit) {
      const std::size_t at = random() % damaged.size();
      if (random() % 3 == 0) {
        damaged.resize(at);
        if (damaged.empty()) damaged = "x";
      } else {
        damaged[at] = static_cast<char>(random() % 256);
      }
    }
    TokenizerData data;
    data.tokenizer_json = damaged;
    try {
      const Tokenizer tokenizer(data);
      tokenizer.decode(tokenizer.encode("Hello <|end|> 123 \xE4\xBD\xA0"));
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace reprise
