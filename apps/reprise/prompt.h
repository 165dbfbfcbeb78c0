// One prompt from the command line, as text and token ids, alone or as the continuation of a cached one.
// Threads: free functions.
#pragma once

#include <optional>
#include <string>

#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/generate.h"

namespace reprise::app {

struct PromptRequest {
  std::string prompt;
  std::optional<std::string> system_prompt = {};
  std::optional<std::string> prefill_response = {};  // the answer's beginning; the model goes on from there
  bool ignore_chat_template = false;
  std::string tools_json = {};
  std::string kwargs_json = {};
};

// The ids of the whole prompt: rendered by the chat template where there is one, else the plain text with the
// tokenizer's own special tokens.
Tokens encode_prompt(const LoadedModel& model, const PromptRequest& request);

// The user's message left open, as cache-prompt stores it.
struct OpenPrompt {
  std::string text;
  Tokens ids;
};
OpenPrompt open_prompt(const LoadedModel& model, const PromptRequest& request);

// What a cache file's "app" member records of such a prompt, and reads back; none when it is no cache-prompt file.
std::string prompt_text_to_json(const std::string& text);
std::optional<std::string> prompt_text_from_json(const std::string& json);

// The name of the model to load for a cache file: the file's own, or the flag's where both mean the same.
// Throws: Error (failed_precondition) when they differ.
std::string model_of_cache(const LoadedPromptCache& stored, const std::optional<std::string>& flag);
// Throws: Error (failed_precondition) when `model` is not what made the cache.
void check_model_of_cache(const LoadedPromptCache& stored, const LoadedModel& model);

// `stored` and what must be processed after it to answer `request`, whose prompt continues the cached text. Generation
// from there equals generation from the whole text. Where that cannot be made sure of, a warning goes to the log.
struct ContinuedPrompt {
  RecordedCache cache;
  Tokens ids;
};
ContinuedPrompt continue_prompt(LoadedPromptCache stored, const LoadedModel& model, const PromptRequest& request);

}  // namespace reprise::app
