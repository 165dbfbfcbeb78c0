#include "apps/reprise/prompt.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <numeric>

#include "apps/reprise/model_path.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/rotating_kv_cache.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

// Tokens at a cache's end that the text behind it may change: further off, something else differs.
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
  const auto whole = render(model, request, request.prompt);
  // The template's own words are in `whole`; what it may leave out of the request is not.
  const auto placeholder =
      unused_placeholder({whole, request.system_prompt.value_or(""), request.prefill_response.value_or(""),
                          request.tools_json, request.kwargs_json});
  const auto marked = render(model, request, placeholder);
  const auto at = marked.find(placeholder);
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

std::string dtype_name(mlx::core::Dtype dtype) {
  if (dtype == mlx::core::float32) return "float32";
  if (dtype == mlx::core::float16) return "float16";
  if (dtype == mlx::core::bfloat16) return "bfloat16";
  return "another dtype";
}

// Of the first layer's keys; none for a layer that keeps none as numbers.
std::optional<mlx::core::Dtype> keys_dtype(const PromptCache& cache) {
  if (cache.size() == 0) return std::nullopt;
  std::vector<mlx::core::array> arrays;
  cache[0].saved_state().collect_arrays(arrays);
  if (arrays.empty() || !mlx::core::issubdtype(arrays[0].dtype(), mlx::core::floating)) return std::nullopt;
  return arrays[0].dtype();
}

// Tokens that went in, which a bounded layer need not hold any more.
int position_of(const PromptCache& cache) {
  int position = cache_length(cache);
  for (std::size_t i = 0; i < cache.size(); ++i) position = std::max(position, cache[i].position().value_or(0));
  return position;
}

// Calls `visit` with every cache and its layer, children of lists in place of the lists.
void visit_caches(const LayerCache& cache, std::size_t layer,
                  const std::function<void(const LayerCache&, std::size_t)>& visit) {
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) visit_caches(list->child(i), layer, visit);
  } else {
    visit(cache, layer);
  }
}

[[noreturn]] void refuse_layer(std::size_t layer, const LayerCache& cache, const std::string& flag) {
  throw Error(ErrorCode::failed_precondition, "the prompt cache holds a " + describe_cache(cache) + " in layer " +
                                                  std::to_string(layer) + ", but " + flag +
                                                  " is given: leave it out, or make the file anew");
}

std::optional<KVQuantization> quantization_of(const LayerCache& cache) {
  const auto* layer = dynamic_cast<const AttentionCache*>(&cache);
  if (layer == nullptr || layer->empty()) return std::nullopt;
  const auto stored = layer->keys_and_values();
  const auto* quantized = std::get_if<QuantizedKV>(&stored);
  return quantized != nullptr ? std::optional(quantized->quantization) : std::nullopt;
}

// What the cache and the whole prompt share stays; the rest is to be computed.
ContinuedPrompt continued(RecordedCache cache, const Tokens& whole, const LoadedModel& model,
                          const KVCacheOptions& kv_cache) {
  if (!whole.empty()) keep_common_prefix(*model.model, cache, whole, kv_cache);
  const auto at = whole.begin() + static_cast<std::ptrdiff_t>(std::min(cache.tokens.size(), whole.size()));
  return {std::move(cache), Tokens(at, whole.end())};
}

void warn_of_seam(std::size_t again) {
  warn("the prompt joins the cached one within a token: " + std::to_string(again) +
       " cached tokens are processed again");
}

ContinuedPrompt continue_recorded(LoadedPromptCache stored, const PromptRecord& record, const LoadedModel& model,
                                  const PromptRequest& request, const KVCacheOptions& kv_cache) {
  PromptRequest joined = request;
  joined.prompt = record.text + request.prompt;
  if (!joined.system_prompt) joined.system_prompt = record.system_prompt;
  if (joined.tools_json.empty()) joined.tools_json = record.tools_json;
  if (joined.kwargs_json.empty()) joined.kwargs_json = record.kwargs_json;
  const auto whole = encode_prompt(model, joined);
  const auto& cached = *stored.extension.tokens;
  const auto common = common_prefix(cached, whole);
  const auto again = cached.size() - common;
  const bool same_kind = record.plain != uses_template(model, joined) && joined.system_prompt == record.system_prompt &&
                         joined.tools_json == record.tools_json && joined.kwargs_json == record.kwargs_json;
  if (again > kSeamTokens || (again > 0 && !same_kind)) {
    warn("the prompt cache begins otherwise than this prompt (another system prompt, template or tools): " +
         std::to_string(again) + " of its " + std::to_string(cached.size()) + " tokens are processed again");
  } else if (again > 0) {
    warn_of_seam(again);
  }
  const auto fed = std::accumulate(record.pieces.begin(), record.pieces.end(), std::int64_t{0});
  const bool fits = fed <= static_cast<std::int64_t>(cached.size());
  return continued({std::move(stored.cache), cached, fits ? record.pieces : std::vector<int>()}, whole, model,
                   kv_cache);
}

// The rendered text behind the cache, as mlx-lm does it.
ContinuedPrompt continue_unrecorded(LoadedPromptCache stored, const LoadedModel& model, const PromptRequest& request,
                                    const KVCacheOptions& kv_cache) {
  const auto split = split_prompt(model, request);
  if (!request.prompt.empty() && !split.suffix.starts_with(request.prompt.front())) {
    warn("the chat template changes the beginning of the prompt: the answer may differ from the whole prompt's");
  }
  auto ids = model.tokenizer.encode(split.suffix);
  if (!stored.extension.tokens) {
    warn("the prompt cache has no record of its tokens: whether the prompt continues them cannot be verified");
    Tokens unknown(static_cast<std::size_t>(position_of(stored.cache)), 0);
    return {{std::move(stored.cache), std::move(unknown)}, std::move(ids), /*tokens_known=*/false};
  }
  const auto& cached = *stored.extension.tokens;
  const auto text = model.tokenizer.decode(cached);
  if (!text.starts_with(split.head)) {
    warn(
        "the prompt cache begins otherwise than this prompt: it was made with another system prompt, template or "
        "tools");
  }
  const auto whole = model.tokenizer.encode(text + split.suffix);
  const auto common = common_prefix(cached, whole);
  if (common + kSeamTokens < cached.size()) {
    warn("the cached tokens are no prefix of the whole prompt's tokens: the answer may differ from the whole prompt's");
    return {{std::move(stored.cache), cached}, std::move(ids)};
  }
  if (common < cached.size()) warn_of_seam(cached.size() - common);
  return continued({std::move(stored.cache), cached}, whole, model, kv_cache);
}

}  // namespace

Tokens encode_prompt(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) return model.tokenizer.encode(request.prompt, {.add_special_tokens = true});
  return model.tokenizer.encode(render(model, request, request.prompt));
}

Tokens encode_open_prompt(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) return encode_prompt(model, request);
  const RenderOptions options{
      .continue_final_message = true, .tools_json = request.tools_json, .kwargs_json = request.kwargs_json};
  return model.tokenizer.encode(model.chat_template->render(messages_of(request, request.prompt), options));
}

PromptRecord record_of(const LoadedModel& model, const PromptRequest& request) {
  if (!uses_template(model, request)) return {.text = request.prompt, .plain = true};
  return {.text = request.prompt,
          .system_prompt = request.system_prompt,
          .plain = false,
          .tools_json = request.tools_json,
          .kwargs_json = request.kwargs_json};
}

std::string unused_placeholder(const std::vector<std::string>& texts) {
  for (int i = 0;; ++i) {
    auto placeholder = "REPRISE" + std::to_string(i) + "TEXT";
    const bool used = std::any_of(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text.find(placeholder) != std::string::npos; });
    if (!used) return placeholder;
  }
}

std::string model_of_cache(const LoadedPromptCache& stored, const std::optional<std::string>& flag) {
  const auto found = stored.metadata.find("model");
  if (found == stored.metadata.end() || found->second.empty()) {
    if (flag) return *flag;
    throw Error(ErrorCode::not_found, "the prompt cache does not say which model made it: name it with --model");
  }
  if (!flag) {
    try {
      resolve_model(found->second);
    } catch (const Error& error) {
      throw Error(error.code(), std::string(error.what()) + " (the prompt cache names it; --model says where it is)");
    }
    return found->second;
  }
  if (*flag == found->second) return *flag;
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

KVCacheOptions kv_cache_of(const LoadedPromptCache& stored, const LoadedModel& model, const KVCacheFlags& flags) {
  KVCacheOptions options = flags.options;
  std::optional<KVQuantization> found;
  const auto own = make_prompt_cache(*model.model);
  for (std::size_t i = 0; i < stored.cache.size(); ++i) {
    visit_caches(stored.cache[i], i, [&](const LayerCache& cache, std::size_t layer) {
      if (const auto quantization = quantization_of(cache)) {
        if (flags.options.kv_bits && quantization->bits != *flags.options.kv_bits) {
          refuse_layer(layer, cache, "--kv-bits " + std::to_string(*flags.options.kv_bits));
        }
        if (flags.group_size_given && quantization->group_size != flags.options.kv_group_size) {
          refuse_layer(layer, cache, "--kv-group-size " + std::to_string(flags.options.kv_group_size));
        }
        found = quantization;
      }
      const bool own_growing = layer < own.size() && own[layer].keeps_all_rows();
      const auto* ring = dynamic_cast<const internal::RingCache*>(&cache);
      const auto& wanted = flags.options.max_kv_size;
      if (own_growing && wanted && (ring == nullptr || ring->max_size() != *wanted)) {
        refuse_layer(layer, cache, "--max-kv-size " + std::to_string(*wanted));
      }
      if (own_growing && ring != nullptr && ring->max_size() > 4) options.max_kv_size = ring->max_size();
    });
  }
  if (found) {
    options.kv_bits = found->bits;
    options.kv_group_size = found->group_size;
    // What is computed again becomes what the file holds.
    const auto record = prompt_record_from_json(stored.extension.app_json);
    if (record && record->quantized_kv_start) options.quantized_kv_start = *record->quantized_kv_start;
  }
  return options;
}

void warn_of_other_dtype(const LoadedPromptCache& stored, const LoadedModel& model) {
  const auto kept = keys_dtype(stored.cache);
  // Nothing is evaluated: the graph of one step knows the dtype.
  auto fresh = model.model->make_cache();
  model.model->forward(mlx::core::zeros({1, 1}, mlx::core::int32), fresh);
  const auto own = keys_dtype(fresh);
  if (!kept || !own || *kept == *own) return;
  warn("the prompt cache holds " + dtype_name(*kept) + ", but this run keeps " + dtype_name(*own) +
       ": the answer may differ from the whole prompt's (--kv-dtype " + dtype_name(*kept) + " makes them equal)");
}

ContinuedPrompt continue_prompt(LoadedPromptCache stored, const LoadedModel& model, const PromptRequest& request,
                                const KVCacheOptions& kv_cache) {
  const auto record = prompt_record_from_json(stored.extension.app_json);
  if (!record || !stored.extension.tokens) return continue_unrecorded(std::move(stored), model, request, kv_cache);
  return continue_recorded(std::move(stored), *record, model, request, kv_cache);
}

}  // namespace reprise::app
