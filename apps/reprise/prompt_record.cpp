#include "apps/reprise/prompt_record.h"

#include <cstdint>
#include <limits>
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

std::optional<int> int_of(const Json& number, int least) {
  if (!number.is_number_integer()) return std::nullopt;
  const auto value = number.get<std::int64_t>();
  if (value < least || value > std::numeric_limits<int>::max()) return std::nullopt;
  return static_cast<int>(value);
}

std::vector<int> pieces_of(const Json& object) {
  const auto found = object.find("pieces");
  if (found == object.end() || !found->is_array()) return {};
  std::vector<int> pieces;
  for (const Json& number : *found) {
    const auto piece = int_of(number, 1);
    if (!piece) return {};
    pieces.push_back(*piece);
  }
  return pieces;
}

}  // namespace

std::string prompt_record_to_json(const PromptRecord& record) {
  Json prompt = {{"text", record.text}, {"plain", record.plain}};
  if (record.system_prompt) prompt["system"] = *record.system_prompt;
  if (!record.tools_json.empty()) prompt["tools"] = record.tools_json;
  if (!record.kwargs_json.empty()) prompt["template_kwargs"] = record.kwargs_json;
  if (!record.pieces.empty()) prompt["pieces"] = record.pieces;
  if (record.quantized_kv_start) prompt["quantized_kv_start"] = *record.quantized_kv_start;
  return Json({{"prompt", prompt}}).dump();
}

std::optional<PromptRecord> prompt_record_from_json(const std::string& json) {
  const auto prompt = member_object(json, "prompt");
  if (!prompt) return std::nullopt;
  const auto text = text_of(*prompt, "text");
  const auto plain = prompt->find("plain");
  if (!text || plain == prompt->end() || !plain->is_boolean()) return std::nullopt;
  const auto start = prompt->find("quantized_kv_start");
  return PromptRecord{.text = *text,
                      .system_prompt = text_of(*prompt, "system"),
                      .plain = plain->get<bool>(),
                      .tools_json = text_of(*prompt, "tools").value_or(""),
                      .kwargs_json = text_of(*prompt, "template_kwargs").value_or(""),
                      .pieces = pieces_of(*prompt),
                      .quantized_kv_start = start == prompt->end() ? std::nullopt : int_of(*start, 0)};
}

std::optional<std::string> prompt_text_from_json(const std::string& json) {
  const auto prompt = member_object(json, "prompt");
  return prompt ? text_of(*prompt, "text") : std::nullopt;
}

bool is_chat_record(const std::string& json) { return member_object(json, "chat").has_value(); }

}  // namespace reprise::app
