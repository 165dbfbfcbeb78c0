#include "apps/reprise/prompt_record.h"

#include <nlohmann/json.hpp>

namespace reprise::app {
namespace {

using Json = nlohmann::json;

// The object under `key`, or none.
std::optional<Json> member_object(const std::string& text, const char* key) {
  const auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains(key) || !json[key].is_object()) return std::nullopt;
  return json[key];
}

std::optional<std::string> text_of(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

}  // namespace

std::string prompt_record_to_json(const PromptRecord& record) {
  Json prompt = {{"text", record.text}, {"plain", record.plain}};
  if (record.system_prompt) prompt["system"] = *record.system_prompt;
  if (!record.tools_json.empty()) prompt["tools"] = record.tools_json;
  if (!record.kwargs_json.empty()) prompt["template_kwargs"] = record.kwargs_json;
  return Json({{"prompt", prompt}}).dump();
}

std::optional<PromptRecord> prompt_record_from_json(const std::string& json) {
  const auto prompt = member_object(json, "prompt");
  if (!prompt) return std::nullopt;
  const auto text = text_of(*prompt, "text");
  const auto plain = prompt->find("plain");
  if (!text || plain == prompt->end() || !plain->is_boolean()) return std::nullopt;
  return PromptRecord{.text = *text,
                      .system_prompt = text_of(*prompt, "system"),
                      .plain = plain->get<bool>(),
                      .tools_json = text_of(*prompt, "tools").value_or(""),
                      .kwargs_json = text_of(*prompt, "template_kwargs").value_or("")};
}

std::optional<std::string> prompt_text_from_json(const std::string& json) {
  const auto prompt = member_object(json, "prompt");
  return prompt ? text_of(*prompt, "text") : std::nullopt;
}

bool is_chat_record(const std::string& json) { return member_object(json, "chat").has_value(); }

}  // namespace reprise::app
