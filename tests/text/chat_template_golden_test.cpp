// Chat templates render as Hugging Face's transformers renders them: whole templates of the common shapes, and the
// language bit by bit.
#include <gtest/gtest.h>

#include "reprise/base/error.h"
#include "reprise/text/chat_template.h"
#include "tests/text/text_data.h"

namespace reprise {
namespace {

using testing::json;

std::map<std::string, std::string> templates() {
  std::map<std::string, std::string> found;
  const std::string file = testing::read_text_data("templates.jinja.txt");
  const std::string separator = "\n======\n";
  for (std::size_t start = 0; start <= file.size();) {
    const std::size_t end = std::min(file.find(separator, start), file.size());
    const std::string block = file.substr(start, end - start);
    const std::size_t line = block.find('\n');
    found[block.substr(0, line)] = block.substr(line + 1);
    start = end + separator.size();
  }
  return found;
}

std::vector<ChatMessage> messages_of(const json& chat) {
  std::vector<ChatMessage> messages;
  for (const json& message : chat) {
    json extra = message;
    extra.erase("role");
    ChatMessage made{.role = message.at("role"), .content = ""};
    if (message.at("content").is_string()) {
      made.content = message.at("content");
      extra.erase("content");
    }
    if (!extra.empty()) made.extra_json = extra.dump();
    messages.push_back(made);
  }
  return messages;
}

TEST(ChatTemplateGolden, EveryCaseRendersAsTransformersDoes) {
  const json golden = testing::read_golden("templates.json");
  const auto sources = templates();
  ASSERT_GE(golden.at("cases").size(), 150U);
  std::size_t failures = 0;
  for (const json& wanted : golden.at("cases")) {
    const std::string name = wanted.at("template");
    RenderOptions options{.add_generation_prompt = wanted.at("mode") == "generate",
                          .continue_final_message = wanted.at("mode") == "continue",
                          .tools_json = wanted.at("tools") ? golden.at("tools").dump() : ""};
    json kwargs = name.starts_with("language") ? golden.at("kwargs") : json::object();
    kwargs["enable_thinking"] = wanted.at("chat") == "reasoning";
    options.kwargs_json = kwargs.dump();
    std::string text;
    bool fails = false;
    try {
      TokenizerData data;
      data.chat_template = sources.at(name);
      data.bos_token = "<s>";
      data.eos_token = "</s>";
      text = ChatTemplate(data).render(messages_of(golden.at("chats").at(wanted.at("chat"))), options);
    } catch (const Error& error) {
      fails = true;
      text = error.what();
    }
    EXPECT_EQ(fails, wanted.contains("fails")) << wanted << "\n" << text;
    if (wanted.contains("fails")) {
      ++failures;
    } else if (wanted.contains("text")) {
      EXPECT_EQ(text, wanted.at("text").get<std::string>()) << wanted.at("template") << " " << wanted.at("chat");
    } else {
      EXPECT_EQ(testing::short_hash(text), wanted.at("sha256").get<std::string>()) << wanted << "\n" << text;
    }
  }
  EXPECT_LT(failures, golden.at("cases").size() / 4);
}

}  // namespace
}  // namespace reprise
