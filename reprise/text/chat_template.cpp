#include "reprise/text/chat_template.h"

#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "reprise/base/error.h"
#include "reprise/text/textkit_call.h"

namespace reprise {

namespace {

// Members keep their order: templates print them.
using json = nlohmann::ordered_json;

// transformers marks the end of the message that is to be continued by this, and cuts there. The space at its end
// shows whether the template trims.
constexpr std::string_view kMark = "CONTINUE_FINAL_MESSAGE_TAG ";
constexpr std::string_view kTrimmedMark = kMark.substr(0, kMark.size() - 1);

// What Python's str.strip() and str.rstrip() take off, as far as it is ASCII.
constexpr std::string_view kBlanks = " \t\n\r\v\f\x1c\x1d\x1e\x1f";

[[noreturn]] void invalid(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "[ChatTemplate::render] " + what);
}

// Deeper JSON is nobody's message, and walking it would exhaust the stack.
constexpr int kMaxJsonDepth = 100;

json parse(const std::string& text, const char* what, json::value_t type) {
  const auto check_depth = [&](int depth, json::parse_event_t, json&) {
    if (depth > kMaxJsonDepth) invalid(std::string(what) + " nests deeper than " + std::to_string(kMaxJsonDepth));
    return true;
  };
  json value = json::parse(text, check_depth, false);
  if (value.is_discarded() || value.type() != type) {
    invalid(std::string(what) + " must be a JSON " + (type == json::value_t::array ? "list" : "object") + ", but got " +
            text.substr(0, 100));
  }
  return value;
}

// The message as transformers shows it to templates: without members that are null, and with its reasoning under both
// names in use.
json message_json(const ChatMessage& message) {
  json object = {{"role", message.role}, {"content", message.content}};
  if (!message.extra_json.empty()) {
    const json extra = parse(message.extra_json, "extra_json", json::value_t::object);
    for (const auto& [key, value] : extra.items()) object[key] = value;
  }
  json shown = json::object();
  for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
    const auto reasoning = object.find(name);
    if (reasoning == object.end() || reasoning->is_null()) continue;
    shown["thinking"] = *reasoning;
    object["reasoning_content"] = *reasoning;
    break;
  }
  for (const auto& [key, value] : object.items()) {
    if (!value.is_null()) shown[key] = value;
  }
  return shown;
}

// Puts the mark behind the text of the last message. Returns that text.
std::string mark_final_message(json& messages) {
  if (messages.empty()) invalid("continue_final_message needs a message");
  if (!messages.back().contains("content")) invalid("continue_final_message needs text in the last message");
  json& content = messages.back()["content"];
  json* text = &content;
  if (content.is_array()) {
    text = nullptr;
    for (auto part = content.rbegin(); part != content.rend() && text == nullptr; ++part) {
      if (part->is_object() && part->contains("text")) text = &(*part)["text"];
    }
  }
  if (text == nullptr || !text->is_string()) invalid("continue_final_message needs text in the last message");
  std::string original = text->get<std::string>();
  *text = original + std::string(kMark);
  return original;
}

std::string_view strip(std::string_view text) {
  const std::size_t start = text.find_first_not_of(kBlanks);
  if (start == std::string_view::npos) return {};
  return text.substr(start, text.find_last_not_of(kBlanks) + 1 - start);
}

void cut_at_mark(std::string& rendered, const std::string& final_message) {
  const std::size_t mark = rendered.rfind(kTrimmedMark);
  if (mark == std::string::npos || rendered.find(strip(final_message)) == std::string::npos) {
    invalid("the template does not render the final message as it is, so it cannot be continued");
  }
  const bool keeps_space = rendered.compare(mark, kMark.size(), kMark) == 0;
  rendered.resize(mark);
  if (!keeps_space) rendered.resize(rendered.find_last_not_of(kBlanks) + 1);
}

}  // namespace

struct ChatTemplate::Impl {
  internal::TextkitTemplate textkit;
  json special_tokens = json::object();
};

ChatTemplate::ChatTemplate(const TokenizerData& data) {
  if (data.chat_template.empty()) throw Error(ErrorCode::not_found, "[ChatTemplate] the model has no chat template");
  auto impl = std::make_unique<Impl>();
  textkit_template* made = nullptr;
  internal::TextkitText message;
  const textkit_status status =
      textkit_template_new(data.chat_template.data(), data.chat_template.size(), &made, message.out());
  internal::check_textkit(status, "ChatTemplate", message);
  impl->textkit.reset(made);
  const std::pair<const char*, const std::string&> tokens[] = {{"bos_token", data.bos_token},
                                                               {"eos_token", data.eos_token},
                                                               {"unk_token", data.unk_token},
                                                               {"pad_token", data.pad_token}};
  for (const auto& [name, token] : tokens) {
    if (!token.empty()) impl->special_tokens[name] = token;
  }
  impl_ = std::move(impl);
}

ChatTemplate ChatTemplate::chatml(const std::string& bos_token) {
  TokenizerData data;
  data.bos_token = bos_token;
  data.chat_template =
      "{{- bos_token }}{%- for message in messages %}"
      "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
      "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";
  return ChatTemplate(data);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages, const RenderOptions& options) const {
  if (options.add_generation_prompt && options.continue_final_message) {
    invalid("add_generation_prompt and continue_final_message exclude each other");
  }
  json variables = impl_->special_tokens;
  json list = json::array();
  for (const ChatMessage& message : messages) list.push_back(message_json(message));
  std::string final_message;
  if (options.continue_final_message) final_message = mark_final_message(list);
  variables["messages"] = std::move(list);
  variables["tools"] =
      options.tools_json.empty() ? json() : parse(options.tools_json, "tools_json", json::value_t::array);
  variables["documents"] = nullptr;
  variables["add_generation_prompt"] = options.add_generation_prompt;
  if (!options.kwargs_json.empty()) {
    const json kwargs = parse(options.kwargs_json, "kwargs_json", json::value_t::object);
    for (const auto& [key, value] : kwargs.items()) variables[key] = value;
  }
  std::string text;
  try {
    text = variables.dump();
  } catch (const json::exception&) {
    invalid("a message is not UTF-8");
  }
  internal::TextkitText output;
  internal::TextkitText message;
  const textkit_status status =
      textkit_template_render(impl_->textkit.get(), text.data(), text.size(), output.out(), message.out());
  internal::check_textkit(status, "ChatTemplate::render", message);
  std::string rendered(output.view());
  if (options.continue_final_message) cut_at_mark(rendered, final_message);
  return rendered;
}

}  // namespace reprise
