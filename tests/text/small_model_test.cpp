// The small model's GGUF file, held against transformers with the model's tokenizer.json and template.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "reprise/storage/model_files.h"
#include "reprise/text/chat_template.h"
#include "reprise/text/detokenizer.h"
#include "reprise/text/tokenizer.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

TEST(SmallModelText, TwoHundredChatsGiveThePromptsAndIdsOfTransformers) {
  const char* named = std::getenv("REPRISE_MODEL");
  const std::filesystem::path path =
      named != nullptr ? named : REPRISE_SOURCE_DIR "/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::is_regular_file(path)) GTEST_SKIP() << "no small model: set REPRISE_MODEL";
  const TokenizerData data = read_model_files(path).tokenizer;
  const Tokenizer tokenizer(data);
  const ChatTemplate chat_template(data);
  const json golden = testing::read_golden("smollm2.json");
  ASSERT_EQ(golden.at("chats").size(), 200U);
  for (const json& chat : golden.at("chats")) {
    std::vector<ChatMessage> messages;
    for (const json& message : chat.at("messages")) messages.push_back({message.at(0), message.at(1)});
    const std::string prompt =
        chat_template.render(messages, {.add_generation_prompt = chat.at("mode") == "generate",
                                        .continue_final_message = chat.at("mode") == "continue",
                                        .tools_json = chat.at("tools") ? golden.at("tools").dump() : ""});
    const Tokens ids = tokenizer.encode(prompt);
    std::string joined;
    for (const TokenId id : ids) joined += (joined.empty() ? "" : ",") + std::to_string(id);
    EXPECT_EQ(testing::short_hash(prompt), chat.at("prompt").get<std::string>()) << chat << "\n" << prompt;
    EXPECT_EQ(ids.size(), chat.at("count").get<std::size_t>());
    EXPECT_EQ(testing::short_hash(joined), chat.at("ids").get<std::string>()) << chat << "\n" << joined;
    if (chat.contains("ids_list")) {
      EXPECT_EQ(prompt, chat.at("prompt_text").get<std::string>());
      EXPECT_EQ(ids, chat.at("ids_list").get<Tokens>());
    }
    EXPECT_EQ(tokenizer.decode(ids), prompt);
    Detokenizer detokenizer(tokenizer, {.skip_special_tokens = false});
    std::string streamed;
    for (const TokenId id : ids) streamed += detokenizer.add(id);
    EXPECT_EQ(streamed + detokenizer.finish(), prompt);
  }
}

}  // namespace
}  // namespace reprise
