#include "reprise/generate/chat_file.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "reprise/base/error.h"

namespace reprise::internal {

using Json = nlohmann::json;

namespace {

constexpr int kVersion = 1;  // stored on disk: raise when a reader of the old one would go wrong

// Sampling fields as they stand in the file. One table serves both directions.
template <typename Params, typename Visit>
void visit_numbers(Params& params, Visit visit) {
  visit("temperature", params.temperature);
  visit("top_p", params.top_p);
  visit("top_k", params.top_k);
  visit("min_p", params.min_p);
  visit("min_tokens_to_keep", params.min_tokens_to_keep);
  visit("xtc_probability", params.xtc_probability);
  visit("xtc_threshold", params.xtc_threshold);
  visit("repetition_penalty", params.repetition_penalty);
  visit("repetition_context_size", params.repetition_context_size);
  visit("presence_penalty", params.presence_penalty);
  visit("presence_context_size", params.presence_context_size);
  visit("frequency_penalty", params.frequency_penalty);
  visit("frequency_context_size", params.frequency_context_size);
}

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[ChatSession::load] the transcript is damaged: " + what);
}

// A member of a JSON object. nlohmann converts between kinds of numbers in silence, so every value is checked first.
const Json& member(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) corrupt(std::string("'") + key + "' is missing");
  return *found;
}

template <typename Number>
Number number_of(const Json& value, const char* key) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (value.is_number()) return value.get<Number>();
  } else if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number <= static_cast<std::uint64_t>(std::numeric_limits<Number>::max())) return static_cast<Number>(number);
  } else if (value.is_number_integer() && std::is_signed_v<Number>) {
    const auto number = value.get<std::int64_t>();
    if (number >= static_cast<std::int64_t>(std::numeric_limits<Number>::min())) return static_cast<Number>(number);
  }
  corrupt(std::string("'") + key + "' has no number that fits, but " + value.dump().substr(0, 40));
}

const Json& list_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (!value.is_array()) corrupt(std::string("'") + key + "' must be a list");
  return value;
}

template <typename Number>
std::vector<Number> numbers_of(const Json& list, const char* key) {
  if (!list.is_array()) corrupt(std::string("'") + key + "' must hold lists");
  std::vector<Number> numbers;
  for (const Json& value : list) numbers.push_back(number_of<Number>(value, key));
  return numbers;
}

std::string text_of(const Json& object, const char* key) {
  const Json& value = member(object, key);
  if (!value.is_string()) corrupt(std::string("'") + key + "' must be text");
  return value.get<std::string>();
}

Json sampling_to_json(const SamplingParams& params) {
  Json json = Json::object();
  visit_numbers(params, [&](const char* key, const auto& value) { json[key] = value; });
  json["xtc_special_tokens"] = params.xtc_special_tokens;
  json["logit_bias"] = Json::array();
  for (const auto& [id, bias] : params.logit_bias) json["logit_bias"].push_back({id, bias});
  json["seed"] = params.seed ? Json(*params.seed) : Json();
  return json;
}

SamplingParams sampling_from_json(const Json& json) {
  SamplingParams params;
  if (!json.is_object()) corrupt("'sampling' must be an object");
  visit_numbers(params, [&](const char* key, auto& value) {
    value = number_of<std::remove_reference_t<decltype(value)>>(member(json, key), key);
  });
  params.xtc_special_tokens = numbers_of<TokenId>(member(json, "xtc_special_tokens"), "xtc_special_tokens");
  for (const Json& pair : list_of(json, "logit_bias")) {
    if (!pair.is_array() || pair.size() != 2) corrupt("'logit_bias' must hold pairs");
    params.logit_bias[number_of<TokenId>(pair[0], "logit_bias")] = number_of<float>(pair[1], "logit_bias");
  }
  const Json& seed = member(json, "seed");
  if (!seed.is_null()) params.seed = number_of<std::uint64_t>(seed, "seed");
  return params;
}

Json kv_cache_to_json(const KVCacheOptions& options) {
  const auto number = [](const std::optional<int>& value) { return value ? Json(*value) : Json(); };
  return {{"max_kv_size", number(options.max_kv_size)},
          {"kv_bits", number(options.kv_bits)},
          {"kv_group_size", options.kv_group_size},
          {"quantized_kv_start", options.quantized_kv_start}};
}

KVCacheOptions kv_cache_from_json(const Json& json) {
  if (!json.is_object()) corrupt("'kv_cache' must be an object");
  const auto number = [&](const char* key) -> std::optional<int> {
    const Json& value = member(json, key);
    if (value.is_null()) return {};
    return number_of<int>(value, key);
  };
  const KVCacheOptions options{
      .max_kv_size = number("max_kv_size"),
      .kv_bits = number("kv_bits"),
      .kv_group_size = number_of<int>(member(json, "kv_group_size"), "kv_group_size"),
      .quantized_kv_start = number_of<int>(member(json, "quantized_kv_start"), "quantized_kv_start")};
  try {
    check_kv_cache_options(options);
  } catch (const Error& error) {
    corrupt(error.what());
  }
  return options;
}

void check(const SavedChat& chat) {
  const auto& messages = chat.messages;
  const std::size_t first = !messages.empty() && messages.front().role == "system" ? 1 : 0;
  bool alternate = (messages.size() - first) % 2 == 0;
  for (std::size_t i = first; i < messages.size(); ++i) {
    alternate = alternate && messages[i].role == ((i - first) % 2 == 0 ? "user" : "assistant");
  }
  if (!alternate) corrupt("user and assistant messages do not alternate");
  const std::size_t turns = (messages.size() - first) / 2;
  if (turns != chat.answers.size() || turns != chat.draws_before.size()) {
    corrupt("the number of answers differs from the number of assistant messages");
  }
  auto draws = chat.draws_before;
  draws.push_back(chat.num_draws);
  if (!std::is_sorted(draws.begin(), draws.end())) corrupt("the numbers of draws do not grow");
}

}  // namespace

std::string chat_to_json(const SavedChat& chat) {
  Json messages = Json::array();
  for (const ChatMessage& message : chat.messages) {
    Json json = {{"role", message.role}, {"content", message.content}};
    if (!message.extra_json.empty()) json["extra"] = message.extra_json;
    messages.push_back(std::move(json));
  }
  Json json = {{"chat",
                {{"version", kVersion},
                 {"messages", std::move(messages)},
                 {"answers", chat.answers},
                 {"draws_before", chat.draws_before},
                 {"num_draws", chat.num_draws},
                 {"sampling", sampling_to_json(chat.sampling)},
                 {"tools", chat.tools_json},
                 {"template_kwargs", chat.kwargs_json}}}};
  // Absent where there is nothing to say, so that such a file is what it always was.
  if (chat.kv_cache != KVCacheOptions()) json["chat"]["kv_cache"] = kv_cache_to_json(chat.kv_cache);
  if (!chat.pieces.empty()) json["chat"]["pieces"] = chat.pieces;
  // An answer cut in the middle of a character holds U+FFFD, never broken UTF-8; a user's message is checked when
  // encoded.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

SavedChat chat_from_json(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("chat")) {
    throw Error(ErrorCode::failed_precondition, "[ChatSession::load] the file holds no chat");
  }
  const Json& body = json["chat"];
  if (!body.is_object()) corrupt("'chat' must be an object");
  const int version = number_of<int>(member(body, "version"), "version");
  if (version < 1) corrupt("'version' must be at least 1");
  if (version > kVersion) {
    throw Error(ErrorCode::unsupported, "[ChatSession::load] the transcript's version must be at most " +
                                            std::to_string(kVersion) + ", but got " + std::to_string(version));
  }
  SavedChat chat;
  for (const Json& message : list_of(body, "messages")) {
    if (!message.is_object()) corrupt("'messages' must hold objects");
    chat.messages.push_back({text_of(message, "role"), text_of(message, "content"),
                             message.contains("extra") ? text_of(message, "extra") : std::string()});
  }
  for (const Json& answer : list_of(body, "answers")) chat.answers.push_back(numbers_of<TokenId>(answer, "answers"));
  chat.draws_before = numbers_of<std::uint64_t>(member(body, "draws_before"), "draws_before");
  chat.num_draws = number_of<std::uint64_t>(member(body, "num_draws"), "num_draws");
  chat.sampling = sampling_from_json(member(body, "sampling"));
  chat.tools_json = text_of(body, "tools");
  chat.kwargs_json = text_of(body, "template_kwargs");
  if (body.contains("kv_cache")) chat.kv_cache = kv_cache_from_json(body["kv_cache"]);
  if (body.contains("pieces")) chat.pieces = numbers_of<int>(body["pieces"], "pieces");
  check(chat);
  return chat;
}

}  // namespace reprise::internal
