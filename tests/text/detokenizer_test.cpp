#include "reprise/text/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

bool is_utf8(const std::string& text) {
  return !json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>().compare(text);
}

std::vector<Tokenizer> tokenizers() {
  const json byte_level = testing::read_golden("byte_level.json");
  const json sentencepiece = testing::read_golden("sentencepiece.json");
  std::vector<Tokenizer> made;
  made.emplace_back(testing::byte_level_json(byte_level));
  made.emplace_back(testing::sentencepiece_gguf(sentencepiece, true));
  made.emplace_back(testing::sentencepiece_gguf(sentencepiece, false));
  for (const char* decoder : {"null", R"({"type":"WordPiece","prefix":"##","cleanup":true})",
                              R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true})"}) {
    json file = byte_level.at("tokenizer");
    file["decoder"] = json::parse(decoder);
    TokenizerData data;
    data.tokenizer_json = file.dump();
    made.emplace_back(data);
  }
  return made;
}

TEST(Detokenizer, PiecesJoinedEqualDecodeForRandomIds) {
  std::mt19937 random(5);
  for (const Tokenizer& tokenizer : tokenizers()) {
    for (int round = 0; round < 300; ++round) {
      const DecodeOptions options{.skip_special_tokens = round % 2 == 0};
      Tokens ids(1 + random() % 50);
      for (TokenId& id : ids) id = static_cast<TokenId>(random() % (tokenizer.vocab_size() + 3)) - 1;
      Detokenizer detokenizer(tokenizer, options);
      std::string joined;
      for (const TokenId id : ids) {
        const std::string piece = detokenizer.add(id);
        EXPECT_TRUE(is_utf8(piece));
        joined += piece;
      }
      joined += detokenizer.finish();
      EXPECT_EQ(joined, tokenizer.decode(ids, options));
    }
  }
}

TEST(Detokenizer, ACharacterComesOutWholeAndAsSoonAsItIsWhole) {
  const json golden = testing::read_golden("sentencepiece.json");
  const Tokenizer tokenizer(testing::sentencepiece_gguf(golden, true));
  Detokenizer detokenizer(tokenizer);
  std::string joined;
  for (const char* byte : {"<0xF0>", "<0x9F>", "<0x99>"}) {
    EXPECT_EQ(detokenizer.add(tokenizer.token_to_id(byte).value()), "") << byte;
  }
  EXPECT_EQ(detokenizer.add(tokenizer.token_to_id("<0x82>").value()), "🙂");
  EXPECT_EQ(detokenizer.finish(), "");
}

TEST(Detokenizer, BrokenBytesBecomeReplacementCharacters) {
  const json golden = testing::read_golden("sentencepiece.json");
  const Tokenizer tokenizer(testing::sentencepiece_gguf(golden, true));
  const auto byte = [&](const char* name) { return tokenizer.token_to_id(name).value(); };
  Detokenizer detokenizer(tokenizer);
  EXPECT_EQ(detokenizer.add(byte("<0xE4>")), "");
  EXPECT_EQ(detokenizer.add(byte("<0xBD>")), "");
  EXPECT_EQ(detokenizer.add(tokenizer.token_to_id("a").value()), "\uFFFDa");
  EXPECT_EQ(detokenizer.add(byte("<0xFF>")), "\uFFFD");
  EXPECT_EQ(detokenizer.add(byte("<0xC3>")), "");
  EXPECT_EQ(detokenizer.finish(), "\uFFFD");
}

TEST(Detokenizer, OnlyTheFirstSpaceOfATextIsTakenOff) {
  const json golden = testing::read_golden("sentencepiece.json");
  const Tokenizer tokenizer(testing::sentencepiece_gguf(golden, true));
  const Tokens ids = tokenizer.encode("  two spaces  inside");
  Detokenizer detokenizer(tokenizer);
  for (int again = 0; again < 2; ++again) {  // finish() makes it new
    std::string joined = detokenizer.add(tokenizer.token_to_id("<s>").value());
    for (const TokenId id : ids) joined += detokenizer.add(id);
    joined += detokenizer.finish();
    EXPECT_EQ(joined, "  two spaces  inside");
  }
}

TEST(Detokenizer, OutlivesItsTokenizer) {
  auto tokenizer = std::make_unique<Tokenizer>(testing::byte_level_json(testing::read_golden("byte_level.json")));
  const Tokens ids = tokenizer->encode("still here");
  Detokenizer detokenizer(*tokenizer);
  tokenizer.reset();
  std::string joined;
  for (const TokenId id : ids) joined += detokenizer.add(id);
  EXPECT_EQ(joined + detokenizer.finish(), "still here");
}

// Cost that grew with the text would run these half a million ids into ctest's limit.
TEST(Detokenizer, HalfAMillionIdsComeOutWhole) {
  const Tokenizer tokenizer(testing::byte_level_json(testing::read_golden("byte_level.json")));
  const Tokens ids = tokenizer.encode("a line of text 你好\n");
  Detokenizer detokenizer(tokenizer);
  std::size_t bytes = 0;
  for (int round = 0; round < 30000; ++round) {
    for (const TokenId id : ids) bytes += detokenizer.add(id).size();
  }
  EXPECT_EQ(bytes, 30000 * std::string("a line of text 你好\n").size());
}

}  // namespace
}  // namespace reprise
