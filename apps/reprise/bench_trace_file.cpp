// Traces as JSON lines.
#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "apps/reprise/bench_trace.h"
#include "reprise/base/error.h"
#include "reprise/storage/file_system.h"

namespace reprise::app {
namespace {

using Json = nlohmann::json;

class LineReader {
 public:
  LineReader(int number, const LoadedModel* model, int answer) : number_(number), model_(model), answer_(answer) {}

  // One request; `turns`: how many the conversation has already.
  TraceTurn turn(const Json& line, int turns) const {
    TraceTurn turn;
    const int said = whole(line, "turn", turns, 0);
    if (said != turns) fail("the turns of a conversation must come in order: " + std::to_string(turns) + " is next");
    turn.tokens = tokens(line, turn.after, turns);
    if (turn.tokens.empty()) fail("the prompt is empty");
    turn.max_tokens = whole(line, "max_tokens", answer_, 1);
    const auto at = line.find("at_ms");
    if (at != line.end()) {
      if (!at->is_number() || at->get<double>() < 0) fail("at_ms must be a number of at least 0");
      turn.at_ms = at->get<double>();
    }
    return turn;
  }

  std::string conversation(const Json& line) const {
    const auto found = line.find("conversation");
    if (found != line.end() && found->is_string()) return found->get<std::string>();
    if (found != line.end() && found->is_number_integer()) return found->dump();
    fail("conversation must be a text or a whole number");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::corrupt_data, "[read_trace] line " + std::to_string(number_) + ": " + what);
  }

 private:
  int whole(const Json& line, const char* key, int otherwise, int least) const {
    const auto found = line.find(key);
    if (found == line.end()) return otherwise;
    if (!found->is_number_integer()) fail(std::string(key) + " must be a whole number");
    const auto number = found->get<std::int64_t>();
    if (number < least || number > std::numeric_limits<int>::max()) {
      fail(std::string(key) + " must be at least " + std::to_string(least) + ", but got " + std::to_string(number));
    }
    return static_cast<int>(number);
  }

  // Of the one way in which the line says its prompt; `after` becomes what comes before it.
  Tokens tokens(const Json& line, int& after, int turns) const {
    int ways = 0;
    for (const char* key : {"prompt_tokens", "new_tokens", "text", "messages"}) ways += line.contains(key) ? 1 : 0;
    if (ways != 1) fail("one of prompt_tokens, new_tokens, text and messages is needed");
    const bool whole_prompt = line.contains("prompt_tokens") || line.contains("messages");
    if (whole_prompt && line.contains("after")) fail("after goes with new_tokens and text only");
    after = whole_prompt ? -1 : whole(line, "after", turns - 1, -1);
    if (after >= turns) fail("after must name an earlier turn, but got " + std::to_string(after));
    if (line.contains("prompt_tokens")) return ids(line["prompt_tokens"]);
    if (line.contains("new_tokens")) return ids(line["new_tokens"]);
    if (model_ == nullptr) fail("texts need a tokenizer");
    return line.contains("text") ? text(line["text"], after) : messages(line["messages"]);
  }

  Tokens ids(const Json& list) const {
    if (!list.is_array()) fail("tokens must be a list of ids");
    Tokens tokens;
    for (const auto& id : list) {
      if (!id.is_number_integer() || id.get<std::int64_t>() < 0 ||
          id.get<std::int64_t>() > std::numeric_limits<TokenId>::max()) {
        fail("tokens must be ids, but got " + id.dump());
      }
      tokens.push_back(id.get<TokenId>());
    }
    return tokens;
  }

  Tokens text(const Json& value, int after) const {
    if (!value.is_string()) fail("text must be a text");
    auto tokens = after < 0 ? beginning_of(model_->tokenizer) : Tokens{};
    const auto more = model_->tokenizer.encode(value.get<std::string>());
    tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
  }

  Tokens messages(const Json& list) const {
    if (!model_->chat_template) fail("messages need a model with a chat template");
    if (!list.is_array() || list.empty()) fail("messages must be a list");
    std::vector<ChatMessage> messages;
    for (const auto& message : list) {
      const bool good = message.is_object() && message.contains("role") && message["role"].is_string() &&
                        message.contains("content") && message["content"].is_string();
      if (!good) fail("each message needs a role and a content");
      messages.push_back({.role = message["role"], .content = message["content"]});
    }
    return model_->tokenizer.encode(model_->chat_template->render(messages));
  }

  int number_;
  const LoadedModel* model_;
  int answer_;
};

}  // namespace

Trace parse_trace(std::string_view lines, const LoadedModel* model, int answer) {
  Trace trace;
  std::map<std::string, std::size_t> places;
  for (int number = 1; !lines.empty(); ++number) {
    const auto end = std::min(lines.find('\n'), lines.size());
    const auto line = lines.substr(0, end);
    lines.remove_prefix(std::min(end + 1, lines.size()));
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const LineReader reader(number, model, answer);
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) reader.fail("it is no JSON object");
    const auto id = reader.conversation(json);
    const auto place = places.try_emplace(id, trace.conversations.size()).first->second;
    if (place == trace.conversations.size()) trace.conversations.push_back({id, {}});
    auto& turns = trace.conversations[place].turns;
    turns.push_back(reader.turn(json, static_cast<int>(turns.size())));
  }
  if (trace.conversations.empty()) throw Error(ErrorCode::corrupt_data, "[read_trace] there is no request in it");
  return trace;
}

Trace read_trace(const std::filesystem::path& file, const LoadedModel& model, int answer) {
  Trace trace = parse_trace(read_file(file), &model, answer);
  trace.name = file.string();
  return trace;
}

std::string trace_lines(const Trace& trace) {
  std::string lines;
  for (const auto& conversation : trace.conversations) {
    int number = 0;
    for (const auto& turn : conversation.turns) {
      Json line = {{"conversation", conversation.id}, {"turn", number}, {"max_tokens", turn.max_tokens}};
      line[turn.after < 0 ? "prompt_tokens" : "new_tokens"] = turn.tokens;
      if (turn.after >= 0 && turn.after != number - 1) line["after"] = turn.after;
      if (turn.at_ms > 0) line["at_ms"] = turn.at_ms;
      lines += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
      ++number;
    }
  }
  return lines;
}

}  // namespace reprise::app
