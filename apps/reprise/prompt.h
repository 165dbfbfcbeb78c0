// One prompt from the command line, as text and token ids, alone or as the continuation of a cached one.
// Threads: free functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apps/reprise/flags.h"
#include "apps/reprise/prompt_record.h"
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

// The ids of the user's message left open, as cache-prompt stores them: the whole prompt may go on with the message.
Tokens encode_open_prompt(const LoadedModel& model, const PromptRequest& request);

// What is written down of it.
PromptRecord record_of(const LoadedModel& model, const PromptRequest& request);

// The name of the model to load for a cache file: the file's own, or the flag's where both mean the same.
// Throws: Error (failed_precondition) when they differ; not_found when the file's own model is not there.
std::string model_of_cache(const LoadedPromptCache& stored, const std::optional<std::string>& flag);
// Throws: Error (failed_precondition) when `model` is not what made the cache.
void check_model_of_cache(const LoadedPromptCache& stored, const LoadedModel& model);

// What the command line asks for, made complete by what the file holds: its layers stay what they are. Throws: Error
// (failed_precondition) when a layer is quantised otherwise, or bounded otherwise, than the flags say.
KVCacheOptions kv_cache_of(const LoadedPromptCache& stored, const LoadedModel& model, const KVCacheFlags& flags);

// A warning in the log when the cache's keys are of another dtype than `model` computes in: they stay in theirs, so the
// answer may differ from the whole prompt's.
void warn_of_other_dtype(const LoadedPromptCache& stored, const LoadedModel& model);

// A cache and what must be processed after it: at least one token.
struct ContinuedPrompt {
  RecordedCache cache;
  Tokens ids;
  // False: the record only counts. Whatever would compute those tokens again computes others.
  bool tokens_known = true;
};

// The answer to `request`, whose prompt continues the cached text, from as much of the cache as is of use. Where the
// file records its prompt, ids and cache are those of the whole prompt: system prompt, tools and template variables are
// the record's where the request names none. Where it does not (another program's file), the request's text goes behind
// what is cached. Warnings in the log say where little of the cache was of use, or equality with the whole prompt
// cannot be made sure of. Throws: Error (failed_precondition) for a saved chat; what rendering and encoding throw.
ContinuedPrompt continue_prompt(LoadedPromptCache stored, const LoadedModel& model, const PromptRequest& request,
                                const KVCacheOptions& kv_cache = {});

// A text that occurs in none of `texts`, and that no template changes or escapes.
std::string unused_placeholder(const std::vector<std::string>& texts);

}  // namespace reprise::app
