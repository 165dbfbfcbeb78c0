#include "apps/reprise/prompt.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

// Stands for the user's text to find out where a template puts it. Nothing a template would change or escape.
constexpr const char* kPlaceholder = "REPRISE0USER0TEXT0GOES0HERE";

// A cache without a text record may differ from the text's tokens this far from its end before that is no seam any
// more.
constexpr std::size_t kSeamTokens = 16;

bool uses_template(const LoadedModel& model, const PromptRequest& request) {
  return model.chat_template.has_value() && !request.ignore_chat_template;
}

std::vector<ChatMessage> messages_of(const PromptRequest& request, const std::string& user_text) {
  std::vector<ChatMessage> messages;
  if (request.system_prompt) messages.push_back({"system", *request.system_prompt});
  messages.push_back({"user", user_text});
  if (request.prefill_response) messages.push_back({"assistant", *request.prefill_response});
  return messages;
}

std::string render(const LoadedModel& model, const PromptRequest& request, const std::string& user_text) {
  RenderOptions options{.tools_json = request.tools_json, .kwargs_json = request.kwargs_json};
  (request.prefill_response ? options.continue_final_message : options.add_generation_prompt) = true;
  return model.chat_template->render(messages_of(request, user_text), options);
}

// What the template puts before the user's text, and the user's text with all that follows.
struct SplitPrompt {
  std::string head;
  std::string suffix;
};

SplitPrompt split_prompt(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) return {"", request.prompt};
  const auto marked = render(model, request, kPlaceholder);
  const auto at = marked.find(kPlaceholder);
  const auto whole = render(model, request, request.prompt);
  if (at == std::string::npos || whole.compare(0, at, marked, 0, at) != 0) {
    throw Error(
        ErrorCode::unsupported,
        "the model's chat template changes what stands before the user's text: its prompts cannot be continued");
  }
  return {marked.substr(0, at), whole.substr(at)};
}

std::size_t common_prefix(const Tokens& a, const Tokens& b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

void warn(const std::string& text) { log(LogLevel::warning, text); }

}  // namespace

Tokens encode_prompt(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) return model.tokenizer.encode(request.prompt, {.add_special_tokens = true});
  return model.tokenizer.encode(render(model, request, request.prompt));
}

OpenPrompt open_prompt(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) {
    return {request.prompt, model.tokenizer.encode(request.prompt, {.add_special_tokens = true})};
  }
  const RenderOptions options{
      .continue_final_message = true, .tools_json = request.tools_json, .kwargs_json = request.kwargs_json};
  auto text = model.chat_template->render(messages_of(request, request.prompt), options);
  auto ids = model.tokenizer.encode(text);
  return {std::move(text), std::move(ids)};
}

std::string prompt_text_to_json(const std::string& text) {
  return nlohmann::json({{"prompt", {{"text", text}}}}).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::optional<std::string> prompt_text_from_json(const std::string& json) {
  const auto app = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!app.is_object() || !app.contains("prompt") || !app["prompt"].is_object()) return std::nullopt;
  const auto text = app["prompt"].find("text");
  if (text == app["prompt"].end() || !text->is_string()) return std::nullopt;
  return text->get<std::string>();
}

std::string model_of_cache(const LoadedPromptCache& stored, const std::optional<std::string>& flag) {
  const auto found = stored.metadata.find("model");
  if (found == stored.metadata.end() || found->second.empty() || found->second == flag.value_or("")) {
    if (flag) return *flag;
    if (found != stored.metadata.end() && !found->second.empty()) return found->second;
    throw Error(ErrorCode::not_found, "the prompt cache does not say which model made it: name it with --model");
  }
  if (!flag) return found->second;
  // Another name of the same model is settled by the fingerprint, once it is loaded.
  if (!stored.extension.model_fingerprint.empty()) return *flag;
  std::error_code ignored;
  if (fs::equivalent(*flag, found->second, ignored)) return *flag;
  throw Error(ErrorCode::failed_precondition,
              "the prompt cache was made by " + found->second + ", but --model names " + *flag);
}

void check_model_of_cache(const LoadedPromptCache& stored, const LoadedModel& model) {
  const auto& fingerprint = stored.extension.model_fingerprint;
  if (fingerprint.empty() || fingerprint == model.fingerprint) return;
  const auto maker = stored.metadata.find("model");
  throw Error(ErrorCode::failed_precondition,
              "the prompt cache was made by another model" +
                  (maker == stored.metadata.end() ? std::string() : " (" + maker->second + ")") + " than " +
                  model.path);
}

ContinuedPrompt continue_prompt(LoadedPromptCache stored, const LoadedModel& model, const PromptRequest& request) {
  const auto split = split_prompt(model, request);
  ContinuedPrompt out{{std::move(stored.cache), {}}, model.tokenizer.encode(split.suffix)};
  if (!stored.extension.tokens) {
    warn("the prompt cache has no record of its tokens: whether the prompt continues them cannot be verified");
    out.cache.tokens.assign(static_cast<std::size_t>(cache_length(out.cache.cache)), 0);
    return out;
  }
  out.cache.tokens = std::move(*stored.extension.tokens);
  const auto recorded = prompt_text_from_json(stored.extension.app_json);
  const auto text = recorded ? *recorded : model.tokenizer.decode(out.cache.tokens);
  if (!text.starts_with(split.head)) {
    warn(
        "the prompt cache begins otherwise than this prompt: it was made with another system prompt, template or "
        "tools");
  }
  // A prompt without template begins with the tokenizer's special tokens, which its text does not spell.
  const bool plain = recorded && !uses_template(model, request);
  const auto whole = model.tokenizer.encode(text + split.suffix, {.add_special_tokens = plain});
  const std::size_t cached = out.cache.tokens.size();
  const std::size_t common = common_prefix(out.cache.tokens, whole);
  const std::size_t kept = std::min(common, whole.size() - std::min<std::size_t>(whole.size(), 1));
  if (kept == cached) {
    out.ids.assign(whole.begin() + static_cast<std::ptrdiff_t>(kept), whole.end());
    return out;
  }
  const auto dropped = static_cast<int>(cached - kept);
  if ((!recorded && common + kSeamTokens < cached) || !can_trim_prompt_cache(out.cache.cache, dropped)) {
    warn("the cached tokens are no prefix of the whole prompt's tokens: the answer may differ from the whole prompt's");
    return out;
  }
  if (common < cached) {
    warn("the prompt joins the cached one within a token: " + std::to_string(dropped) +
         " cached tokens are processed again");
  }
  trim_prompt_cache(out.cache.cache, dropped);
  out.cache.tokens.resize(kept);
  out.ids.assign(whole.begin() + static_cast<std::ptrdiff_t>(kept), whole.end());
  return out;
}

}  // namespace reprise::app
