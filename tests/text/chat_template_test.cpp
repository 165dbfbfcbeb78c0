#include "reprise/text/chat_template.h"

#include <gtest/gtest.h>

#include <ctime>
#include <functional>
#include <thread>

#include "reprise/base/error.h"

namespace reprise {
namespace {

ChatTemplate make(const std::string& source) {
  TokenizerData data;
  data.chat_template = source;
  data.bos_token = "<s>";
  data.eos_token = "</s>";
  return ChatTemplate(data);
}

std::string render(const std::string& source, const std::vector<ChatMessage>& messages = {},
                   const RenderOptions& options = {}) {
  return make(source).render(messages, options);
}

std::pair<ErrorCode, std::string> failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

const std::string kChatMl =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

TEST(ChatTemplate, GenerationPromptOpensTheAssistantsTurn) {
  EXPECT_EQ(render(kChatMl, {{"user", "Hi"}}), "<user>Hi</user>\n");
  EXPECT_EQ(render(kChatMl, {{"user", "Hi"}}, {.add_generation_prompt = true}), "<user>Hi</user>\n<assistant>");
}

TEST(ChatTemplate, SpecialTokensAreVariablesAndAbsentOnesAreUndefined) {
  EXPECT_EQ(render("{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}{{ tools is none }}"), "<s></s>FalseTrue");
}

TEST(ChatTemplate, ContinuedMessageStaysOpen) {
  const std::vector<ChatMessage> chat{{"user", "Hi"}, {"assistant", "I am "}};
  EXPECT_EQ(render(kChatMl, chat, {.continue_final_message = true}), "<user>Hi</user>\n<assistant>I am ");
  const std::string trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}";
  EXPECT_EQ(render(trims, chat, {.continue_final_message = true}), "<user>Hi</user>\n<assistant>I am");
  // The user's message may be the last one, and its text may stand elsewhere too.
  EXPECT_EQ(render(kChatMl, {{"user", "a"}, {"user", "a"}}, {.continue_final_message = true}),
            "<user>a</user>\n<user>a");
}

TEST(ChatTemplate, ContinuingIsRefusedWhereItCannotBe) {
  const auto code = [](const std::string& source, const std::vector<ChatMessage>& chat, bool generate) {
    return failure([&] { render(source, chat, {.add_generation_prompt = generate, .continue_final_message = true}); })
        .first;
  };
  EXPECT_EQ(code(kChatMl, {{"user", "Hi"}}, true), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kChatMl, {}, false), ErrorCode::invalid_argument);
  EXPECT_EQ(code("{{ messages[0].role }}", {{"user", "Hi"}}, false), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kChatMl, {{"user", "Hi", R"({"content": null})"}}, false), ErrorCode::invalid_argument);
}

TEST(ChatTemplate, ContinuesTheLastTextPart) {
  const std::string parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}";
  const ChatMessage message{"user", "", R"({"content": [{"type":"text","text":"one"},{"type":"text","text":"two"}]})"};
  EXPECT_EQ(render(parts, {message}, {.continue_final_message = true}), "[one][two");
}

TEST(ChatTemplate, ExtraMembersAreMergedInTheirOrder) {
  const ChatMessage message{"assistant", "", R"({"z":1,"tool_calls":[{"b":{"y":1.0,"x":null}}],"a":"é","gone":null})"};
  EXPECT_EQ(
      render("{{ messages | tojson }}", {message}),
      R"([{"role": "assistant", "content": "", "z": 1, "tool_calls": [{"b": {"y": 1.0, "x": null}}], "a": "é"}])");
}

TEST(ChatTemplate, ReasoningIsSeenUnderBothNames) {
  const std::string source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}";
  EXPECT_EQ(render(source, {{"assistant", "4", R"({"reasoning_content":"r"})"}}), "r/r");
  EXPECT_EQ(render(source, {{"assistant", "4", R"({"thinking":"t"})"}}), "t/t");
}

TEST(ChatTemplate, ToolsAndKwargsReachTheTemplate) {
  const RenderOptions options{.tools_json = R"([{"name":"f","n":1e2}])", .kwargs_json = R"({"enable_thinking":false})"};
  EXPECT_EQ(render("{{ tools[0].name }}{{ tools[0].n }}{{ enable_thinking }}", {}, options), "f100.0False");
  EXPECT_EQ(render("{{ bos_token }}", {}, {.kwargs_json = R"({"bos_token":"own"})"}), "own");
}

TEST(ChatTemplate, JsonThatIsWrongIsRefused) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  for (const std::string& json : {std::string("{"), std::string("3"), std::string("\"\xFF\""), deep}) {
    for (const auto& [code, message] : {failure([&] { render("x", {}, {.tools_json = json}); }),
                                        failure([&] { render("x", {}, {.kwargs_json = json}); }), failure([&] {
                                          render("x", {{"user", "", json}});
                                        })}) {
      EXPECT_EQ(code, ErrorCode::invalid_argument);
      EXPECT_EQ(message.find("[ChatTemplate::render] "), 0U) << message;
    }
  }
  EXPECT_EQ(failure([&] {
              render("{{ messages[0].content }}", {{"user", "\xFF"}});
            }).first,
            ErrorCode::invalid_argument);
}

TEST(ChatTemplate, WhatTheTemplateRefusesComesThrough) {
  const auto [code, message] = failure([&] {
    render("{{ raise_exception('Only users, not ' ~ messages[0].role) }}", {{"cat", ""}});
  });
  EXPECT_EQ(code, ErrorCode::invalid_argument);
  EXPECT_NE(message.find("Only users, not cat"), std::string::npos) << message;
}

TEST(ChatTemplate, AMistakeNamesItsLine) {
  const auto [code, message] = failure([&] { render("one\ntwo\n{{ messages[0].nothing.more }}", {{"user", ""}}); });
  EXPECT_EQ(code, ErrorCode::invalid_argument);
  EXPECT_NE(message.find("line 3: attribute 'nothing' is undefined"), std::string::npos) << message;
}

TEST(ChatTemplate, TemplatesThatDoNotParseAreCorrupt) {
  for (const char* source :
       {"{% if %}", "{{ 1 +", "{% for x in y %}", "{% include 'x' %}", "{% frobnicate %}", "\xFF", "{{ 'a }}"}) {
    EXPECT_EQ(failure([&] { make(source); }).first, ErrorCode::corrupt_data) << source;
  }
  EXPECT_EQ(failure([&] { make(""); }).first, ErrorCode::not_found);
}

TEST(ChatTemplate, StrftimeNowIsTheLocalTime) {
  const auto now = [] {
    const std::time_t time = std::time(nullptr);
    std::tm broken_down{};
    localtime_r(&time, &broken_down);
    char text[64];
    return std::string(text, std::strftime(text, sizeof(text), "%d %b %Y %H:%M", &broken_down));
  };
  const std::string before = now();
  const std::string rendered = render("{{ strftime_now('%d %b %Y %H:%M') }}");
  EXPECT_TRUE(rendered == before || rendered == now()) << rendered;
}

TEST(ChatTemplate, GenerationBlocksOnlyMarkText) {
  EXPECT_EQ(render("{%- generation -%} a {%- endgeneration -%} b{{ '{% generation %}' }}{# {% generation %} #}"),
            "ab{% generation %}");
}

TEST(ChatTemplate, ManyThreadsMayRender) {
  const ChatTemplate chat_template = make(kChatMl);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string text = std::string(1000, static_cast<char>('a' + t));
      for (int i = 0; i < 50; ++i) wrong += chat_template.render({{"user", text}}) != "<user>" + text + "</user>\n";
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace reprise
