#include "reprise/generate/chat_file.h"

#include <nlohmann/json.hpp>

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
  visit_numbers(params, [&](const char* key, auto& value) { json.at(key).get_to(value); });
  json.at("xtc_special_tokens").get_to(params.xtc_special_tokens);
  for (const Json& pair : json.at("logit_bias")) {
    params.logit_bias[pair.at(0).get<TokenId>()] = pair.at(1).get<float>();
  }
  if (!json.at("seed").is_null()) params.seed = json.at("seed").get<std::uint64_t>();
  return params;
}

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[ChatSession::load] the transcript is damaged: " + what);
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
}

}  // namespace

std::string chat_to_json(const SavedChat& chat) {
  Json messages = Json::array();
  for (const ChatMessage& message : chat.messages) {
    Json json = {{"role", message.role}, {"content", message.content}};
    if (!message.extra_json.empty()) json["extra"] = message.extra_json;
    messages.push_back(std::move(json));
  }
  const Json json = {{"chat",
                      {{"version", kVersion},
                       {"messages", std::move(messages)},
                       {"answers", chat.answers},
                       {"draws_before", chat.draws_before},
                       {"num_draws", chat.num_draws},
                       {"sampling", sampling_to_json(chat.sampling)},
                       {"tools", chat.tools_json},
                       {"template_kwargs", chat.kwargs_json}}}};
  // An answer cut in the middle of a character holds U+FFFD, never broken UTF-8; a user's message is checked when encoded.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

SavedChat chat_from_json(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("chat")) {
    throw Error(ErrorCode::failed_precondition, "[ChatSession::load] the file holds no chat");
  }
  try {
    const Json& body = json.at("chat");
    if (body.at("version").get<int>() > kVersion) {
      throw Error(ErrorCode::unsupported, "[ChatSession::load] the transcript's version must be at most " +
                                              std::to_string(kVersion) + ", but got " + body.at("version").dump());
    }
    SavedChat chat;
    for (const Json& message : body.at("messages")) {
      chat.messages.push_back({message.at("role").get<std::string>(), message.at("content").get<std::string>(),
                               message.value("extra", std::string())});
    }
    body.at("answers").get_to(chat.answers);
    body.at("draws_before").get_to(chat.draws_before);
    body.at("num_draws").get_to(chat.num_draws);
    chat.sampling = sampling_from_json(body.at("sampling"));
    body.at("tools").get_to(chat.tools_json);
    body.at("template_kwargs").get_to(chat.kwargs_json);
    check(chat);
    return chat;
  } catch (const Json::exception& error) {
    corrupt(error.what());
  }
}

}  // namespace reprise::internal
