#include "reprise/generate/chat_session.h"

#include <algorithm>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/chat_file.h"
#include "reprise/generate/restore_checks.h"
#include "reprise/generate/transcript.h"
#include "reprise/text/detokenizer.h"

namespace reprise {

namespace {

// Two a turn: the last turns, and some way back.
constexpr SnapshotLimits kSnapshotLimits{.max_count = 8, .max_bytes = std::size_t{1} << 30U};

}  // namespace

ChatSession::ChatSession(const LoadedModel& model, ChatOptions options)
    : model_(&model), options_(std::move(options)), snapshots_(kSnapshotLimits) {
  if (!model.chat_template) {
    throw Error(ErrorCode::failed_precondition, "[ChatSession] the model '" + model.path + "' has no chat template");
  }
  check_sampling_params(options_.generate.sampling);
  check_kv_cache_options(options_.generate.kv_cache);
  reset();
  plan_kv_cache(*model.model, cache_.cache, options_.generate.kv_cache);
}

ChatSession::Transcript ChatSession::new_transcript() const {
  Transcript transcript;
  if (options_.system_prompt) transcript.messages.push_back({"system", *options_.system_prompt});
  transcript.num_draws = options_.generate.num_draws;
  return transcript;
}

void ChatSession::reset() {
  check_between_turns("reset");
  cache_ = {make_prompt_cache(*model_->model, options_.generate.kv_cache.max_kv_size), {}};
  snapshots_.clear();
  state_ = new_transcript();
}

void ChatSession::set_system_prompt(std::optional<std::string> text) {
  check_between_turns("set_system_prompt");
  options_.system_prompt = std::move(text);
  reset();
}

void ChatSession::check_between_turns(const char* function) const {
  if (!in_turn_) return;
  throw Error(ErrorCode::failed_precondition, std::string("[ChatSession::") + function +
                                                  "] the session must be between turns, but got a call within one");
}

void ChatSession::take_snapshot() {
  if (!keeps_all_rows(cache_.cache) && !cache_.tokens.empty()) {
    snapshots_.take(cache_.cache, static_cast<int>(cache_.tokens.size()));
  }
}

Tokens ChatSession::answer_ids(const GenerateResult& result, const std::vector<TokenId>& stop_tokens) const {
  Tokens ids = result.tokens;
  if (result.finish_reason != FinishReason::stop || ids.empty()) return ids;
  // A stop token ends the answer without being part of it: the template writes its own.
  const auto& eos = model_->tokenizer.eos_token_ids();
  const auto holds = [&](const std::vector<TokenId>& of) {
    return std::find(of.begin(), of.end(), ids.back()) != of.end();
  };
  if (holds(eos) || holds(stop_tokens)) {
    ids.pop_back();
    return ids;
  }
  // A stop string may begin within a token: the ids wholly before it stay, what is left of the text is encoded.
  Detokenizer detokenizer(model_->tokenizer);
  std::string text;
  std::size_t kept_ids = 0;
  std::size_t kept_bytes = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::string piece = detokenizer.add(ids[i]);
    text += piece;
    if (!result.text.starts_with(text)) break;
    if (!piece.empty()) {
      kept_ids = i + 1;
      kept_bytes = text.size();
    }
  }
  ids.resize(kept_ids);
  const Tokens rest = model_->tokenizer.encode(std::string_view(result.text).substr(kept_bytes));
  ids.insert(ids.end(), rest.begin(), rest.end());
  return ids;
}

GenerateResult ChatSession::say(const std::string& text, const TurnOptions& turn) {
  check_between_turns("say");
  std::vector<ChatMessage> messages = state_.messages;
  messages.push_back({"user", text});
  const Tokens ids = internal::transcript_ids(
      model_->tokenizer, *model_->chat_template, messages, state_.answers,
      {.add_generation_prompt = true, .tools_json = options_.tools_json, .kwargs_json = options_.kwargs_json});
  if (ids.empty()) throw Error(ErrorCode::invalid_argument, "[ChatSession::say] the chat template renders nothing");
  keep_common_prefix(*model_->model, cache_, ids, options_.generate.kv_cache, &snapshots_);

  GenerateOptions generate_options = options_.generate;
  generate_options.num_draws = state_.num_draws;
  generate_options.cancel = turn.cancel;
  generate_options.on_progress = turn.on_progress;
  generate_options.on_text = turn.on_text;
  generate_options.on_prefilled = [this] { take_snapshot(); };
  struct InTurn {
    bool& flag;
    explicit InTurn(bool& of) : flag(of) { flag = true; }
    ~InTurn() { flag = false; }
  };
  GenerateResult result = [&] {
    const InTurn guard(in_turn_);
    return generate(*model_, std::span(ids).subspan(cache_.tokens.size()), cache_, generate_options);
  }();
  // What a mismatch has given up must not come back.
  if (result.stats.reuse_mismatches > 0) snapshots_.clear();
  take_snapshot();
  if (result.finish_reason == FinishReason::cancelled && result.tokens.empty()) return result;

  Tokens answer = answer_ids(result, generate_options.stop_tokens);
  messages.push_back({"assistant", internal::answer_text(model_->tokenizer, answer)});
  state_.messages = std::move(messages);
  state_.answers.push_back(std::move(answer));
  state_.draws_before.push_back(state_.num_draws);
  state_.num_draws += result.tokens.size();
  return result;
}

// The cache stays as it is: the next turn trims it to what it shares with the new transcript.
std::optional<std::string> ChatSession::undo() {
  check_between_turns("undo");
  if (state_.answers.empty()) return {};
  state_.messages.pop_back();
  std::string user_text = std::move(state_.messages.back().content);
  state_.messages.pop_back();
  state_.answers.pop_back();
  state_.num_draws = state_.draws_before.back();
  state_.draws_before.pop_back();
  return user_text;
}

ChatSession ChatSession::fork() const {
  check_between_turns("fork");
  ChatSession copy(*model_, options_);
  copy.state_ = state_;
  copy.cache_ = cache_.fork();
  copy.snapshots_ = snapshots_.fork();
  return copy;
}

std::string ChatSession::save(const std::filesystem::path& file) const {
  check_between_turns("save");
  // A check of reuse needs to know them; nothing else does.
  const bool depends_on_pieces = !keeps_all_rows(cache_.cache) || options_.generate.kv_cache.kv_bits;
  SaveOptions save_options;
  save_options.extension.tokens = cache_.tokens;
  save_options.extension.model_fingerprint = model_->fingerprint;
  save_options.extension.app_json =
      internal::chat_to_json({state_.messages, state_.answers, state_.draws_before, state_.num_draws,
                              options_.generate.sampling, options_.tools_json, options_.kwargs_json,
                              options_.generate.kv_cache, depends_on_pieces ? cache_.pieces : std::vector<int>()});
  return save_prompt_cache(file.string(), cache_.cache,
                           {{"model", model_->path}, {"tokenizer_config", model_->tokenizer_config_json}},
                           save_options);
}

void ChatSession::load(const std::filesystem::path& file) {
  check_between_turns("load");
  LoadedPromptCache loaded = load_prompt_cache_file(file.string());
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    throw Error(code, "[ChatSession::load] '" + file.string() + "' " + what);
  };
  if (loaded.extension.app_json.empty() || !loaded.extension.tokens) {
    refuse(ErrorCode::failed_precondition, "is a prompt cache without a chat's transcript");
  }
  internal::SavedChat chat = internal::chat_from_json(loaded.extension.app_json);
  if (loaded.extension.model_fingerprint != model_->fingerprint) {
    refuse(ErrorCode::failed_precondition, "belongs to another model than '" + model_->path + "'");
  }
  RecordedCache restored{std::move(loaded.cache), std::move(*loaded.extension.tokens), std::move(chat.pieces)};
  if (const auto problem = internal::misfit(*model_, restored, chat.kv_cache)) {
    refuse(problem->other_dtype ? ErrorCode::failed_precondition : ErrorCode::corrupt_data, problem->what);
  }
  std::int64_t fed = 0;
  for (const int piece : restored.pieces) {
    if (piece < 1) refuse(ErrorCode::corrupt_data, "has a piece of " + std::to_string(piece) + " tokens");
    fed += piece;
  }
  if (fed > static_cast<std::int64_t>(restored.tokens.size())) {
    refuse(ErrorCode::corrupt_data, "has pieces of more tokens than it holds");
  }
  if (const auto problem = internal::misfit(*model_, chat)) refuse(ErrorCode::corrupt_data, *problem);

  // Nothing below throws but the last, when all is in place.
  const bool has_system = !chat.messages.empty() && chat.messages.front().role == "system";
  options_.system_prompt = has_system ? std::optional(chat.messages.front().content) : std::nullopt;
  options_.generate.sampling = std::move(chat.sampling);
  options_.tools_json = std::move(chat.tools_json);
  options_.kwargs_json = std::move(chat.kwargs_json);
  options_.generate.kv_cache = chat.kv_cache;
  state_ = {std::move(chat.messages), std::move(chat.answers), std::move(chat.draws_before), chat.num_draws};
  cache_ = std::move(restored);
  snapshots_.clear();
  take_snapshot();
}

}  // namespace reprise
