// A GGUF file's tokenizer gives the ids of the tokenizer.json it came from.
#include <gtest/gtest.h>

#include "reprise/text/tokenizer.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

TEST(GgufTokenizer, EveryPreTokenizerSplitsAsHuggingFaceDoes) {
  const json golden = testing::read_golden("byte_level.json");
  std::vector<std::string> names = {"default", ""};
  for (const auto& [name, differing] : golden.at("differing").items()) names.push_back(name);
  ASSERT_GE(names.size(), 13U);
  for (const std::string& name : names) {
    const Tokenizer tokenizer(testing::byte_level_gguf(golden, name));
    for (std::size_t i = 0; i < golden.at("texts").size(); ++i) {
      json wanted = golden.at("ids").at(i);
      if (golden.at("differing").contains(name) && golden.at("differing").at(name).contains(std::to_string(i))) {
        wanted = golden.at("differing").at(name).at(std::to_string(i));
      }
      const std::string text = golden.at("texts").at(i);
      EXPECT_EQ(tokenizer.encode(text), wanted.get<Tokens>()) << name << ": " << json(text);
    }
  }
}

TEST(GgufTokenizer, SentencePieceGivesTheIdsAndTextsOfHuggingFace) {
  const json golden = testing::read_golden("sentencepiece.json");
  for (const bool prefix : {true, false}) {
    const Tokenizer tokenizer(testing::sentencepiece_gguf(golden, prefix));
    const json& wanted = golden.at(prefix ? "prefix" : "plain");
    for (std::size_t i = 0; i < golden.at("texts").size(); ++i) {
      const std::string text = golden.at("texts").at(i);
      const Tokens ids = tokenizer.encode(text);
      EXPECT_EQ(ids, wanted.at("ids").at(i).get<Tokens>()) << prefix << ": " << json(text);
      EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = true}), wanted.at("decoded").at(i).get<std::string>())
          << prefix << ": " << json(text);
    }
  }
}

TEST(GgufTokenizer, RandomIdsDecodeAsHuggingFaceDoes) {
  const json golden = testing::read_golden("byte_level.json");
  for (const TokenizerData& data : {testing::byte_level_json(golden), testing::byte_level_gguf(golden, "smollm")}) {
    const Tokenizer tokenizer(data);
    for (const json& sample : golden.at("decoded")) {
      const Tokens ids = sample.at(0).get<Tokens>();
      EXPECT_EQ(tokenizer.decode(ids), sample.at(1).get<std::string>());
      EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = true}), sample.at(2).get<std::string>());
    }
  }
}

}  // namespace
}  // namespace reprise
