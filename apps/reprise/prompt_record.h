// What cache-prompt writes down of its prompt in a file's "app" member, so that generate can build the whole prompt
// again. Threads: values.
#pragma once

#include <optional>
#include <string>

namespace reprise::app {

struct PromptRecord {
  std::string text;  // the user's own words, before any template
  std::optional<std::string> system_prompt = {};
  bool plain = false;  // no chat template was used
  std::string tools_json = {};
  std::string kwargs_json = {};

  bool operator==(const PromptRecord&) const = default;
};

// {"prompt": {"text", "plain", "system", "tools", "template_kwargs"}}, the last three only where there is something.
std::string prompt_record_to_json(const PromptRecord& record);

// None for what is no such record.
std::optional<PromptRecord> prompt_record_from_json(const std::string& json);

// The prompt's text, whatever else the record holds: what a person wants to see of it. An early form of the record had
// nothing but the rendered text.
std::optional<std::string> prompt_text_from_json(const std::string& json);

// The file is a saved chat.
bool is_chat_record(const std::string& json);

}  // namespace reprise::app
