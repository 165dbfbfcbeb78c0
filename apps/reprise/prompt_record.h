// What cache-prompt writes down of its prompt in a file's "app" member, so that generate can build the whole prompt
// again. Threads: values.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace reprise::app {

struct PromptRecord {
  std::string text;  // the user's own words, before any template
  std::optional<std::string> system_prompt = {};
  bool plain = false;  // no chat template was used
  std::string tools_json = {};
  std::string kwargs_json = {};
  // How the file's tokens were computed, which only a check of their reuse needs: in which pieces, and at how many
  // tokens they were quantised (absent: not at all).
  std::vector<int> pieces = {};
  std::optional<int> quantized_kv_start = {};

  bool operator==(const PromptRecord&) const = default;
};

// {"prompt": {"text", "plain", "system", "tools", "template_kwargs", "pieces", "quantized_kv_start"}}, all but the
// first two only where there is something.
std::string prompt_record_to_json(const PromptRecord& record);

// None for what is no such record. The last two are left out where they are no such numbers: an early form of the
// record had neither.
std::optional<PromptRecord> prompt_record_from_json(const std::string& json);

// The prompt's text, whatever else the record holds: what a person wants to see of it. An early form of the record had
// nothing but the rendered text.
std::optional<std::string> prompt_text_from_json(const std::string& json);

// The file is a saved chat.
bool is_chat_record(const std::string& json);

}  // namespace reprise::app
