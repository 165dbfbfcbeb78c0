// Gemma 3's GGUF file, held against llama.cpp: ids and decoded texts of all kinds of text, and a prompt of ChatML.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "reprise/storage/model_files.h"
#include "reprise/text/chat_template.h"
#include "reprise/text/detokenizer.h"
#include "reprise/text/tokenizer.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

std::optional<TokenizerData> gemma3() {
  const char* named = std::getenv("REPRISE_GEMMA3");
  const std::filesystem::path path =
      named != nullptr ? named : REPRISE_SOURCE_DIR "/.cache/models/gemma-3-270m-q4_k_m.gguf";
  if (!std::filesystem::is_regular_file(path)) return std::nullopt;
  return read_model_files(path).tokenizer;
}

constexpr const char* kNoModel = "no Gemma 3: `./run fetch gemma3`, or set REPRISE_GEMMA3";

TEST(Gemma3Text, FourHundredTextsGiveTheIdsAndTextsOfLlamaCpp) {
  const auto data = gemma3();
  if (!data) GTEST_SKIP() << kNoModel;
  const Tokenizer tokenizer(*data);
  const json golden = testing::read_golden("gemma3.json");
  ASSERT_EQ(golden.size(), 400U);
  for (const json& item : golden) {
    const std::string text = item.at("text");
    const Tokens ids = tokenizer.encode(text, {.add_special_tokens = true});
    EXPECT_EQ(ids, item.at("ids").get<Tokens>()) << json(text);
    const std::string decoded = item.at("decoded").is_null() ? "<bos>" + text : item.at("decoded").get<std::string>();
    EXPECT_EQ(tokenizer.decode(ids), decoded);
    Detokenizer detokenizer(tokenizer, {.skip_special_tokens = false});
    std::string streamed;
    for (const TokenId id : ids) streamed += detokenizer.add(id);
    EXPECT_EQ(streamed + detokenizer.finish(), decoded);
  }
}

TEST(Gemma3Text, ATurnEndsAnAnswer) {
  const auto data = gemma3();
  if (!data) GTEST_SKIP() << kNoModel;
  EXPECT_EQ(Tokenizer(*data).eos_token_ids(), (std::vector<TokenId>{1, 106}));  // <eos>, <end_of_turn>
}

TEST(Gemma3Text, ItsChatsAreWrittenAsLlamaCppWritesThem) {
  const auto data = gemma3();
  if (!data) GTEST_SKIP() << kNoModel;
  EXPECT_TRUE(data->chat_template.empty());
  const auto chatml = ChatTemplate::chatml(data->bos_token);
  EXPECT_EQ(chatml.render({{"user", "Hi"}}, {.add_generation_prompt = true}),
            "<bos><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

}  // namespace
}  // namespace reprise
