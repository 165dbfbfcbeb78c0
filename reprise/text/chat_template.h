// Chat messages to prompt text, by the model's own Jinja template, as Hugging Face renders it (trim_blocks,
// lstrip_blocks, `tojson` without ASCII escapes, `raise_exception`, `strftime_now`, Python's string and dict methods).
// Threads: immutable after construction; any thread may render.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/base/tokenizer_data.h"

namespace reprise {

struct ChatMessage {
  std::string role;     // "system", "user", "assistant", "tool", …
  std::string content;  // UTF-8
  // A JSON object whose members are merged into the message as the template sees it: tool_calls, tool_call_id, name,
  // reasoning_content, … Empty for none. A "content" member in it wins over `content` (parts, or null for no content).
  // As in transformers, members that are null are left out, and reasoning_content is seen as `thinking` too.
  std::string extra_json = {};

  bool operator==(const ChatMessage&) const = default;
};

struct RenderOptions {
  // Opens the assistant's turn after the last message.
  bool add_generation_prompt = false;
  // Leaves the last message open, so that the model continues it. Excludes add_generation_prompt.
  bool continue_final_message = false;
  // JSON list of tool definitions; empty for none.
  std::string tools_json = {};
  // JSON object of further template variables (enable_thinking, …); empty for none.
  std::string kwargs_json = {};
};

class ChatTemplate {
 public:
  // Takes chat_template and the special tokens' texts of `data`.
  // Throws: corrupt_data when the template does not parse; not_found when `data` has no template.
  explicit ChatTemplate(const TokenizerData& data);
  // ChatML: what llama.cpp takes for a model that has no template. Prompts begin with `bos_token`, which may be empty.
  static ChatTemplate chatml(const std::string& bos_token);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // Returns: the prompt text.
  // Throws: invalid_argument for bad options or JSON, for what the template itself refuses (raise_exception; its text
  // is in the message) and for a template that fails; resource_exhausted when it runs too long or too deep.
  std::string render(const std::vector<ChatMessage>& messages, const RenderOptions& options = {}) const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

}  // namespace reprise
