// A conversation over one live cache: every turn computes only its new tokens. Turns, undo, reset, fork, save, load.
// The record of token ids wins over text: an answer stays in the history as the ids that were generated.
// Threads: one session belongs to one thread at a time; GenerateOptions::cancel may be requested from any thread.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/snapshots.h"
#include "reprise/generate/generate.h"

namespace reprise {

struct ChatOptions {
  std::optional<std::string> system_prompt = {};
  GenerateOptions generate = {};  // callbacks and cancel are per turn (TurnOptions)
  std::string tools_json = {};    // JSON list; see RenderOptions
  std::string kwargs_json = {};   // template variables, JSON object
};

struct TurnOptions {
  std::stop_token cancel = {};
  std::function<void(int done, int total)> on_progress = {};
  std::function<void(std::string_view)> on_text = {};
};

class ChatSession {
 public:
  // `model` must outlive the session. Throws: failed_precondition when the model has no chat template; invalid_argument
  // for bad sampling parameters; what plan_kv_cache throws.
  explicit ChatSession(const LoadedModel& model, ChatOptions options = {});

  // One turn: appends `text` as the user's message, answers, appends the answer. An answer that was cancelled or cut by
  // max_tokens stays in the history as far as it came; a turn that was cancelled before its first token, or that ends
  // by an exception, leaves the transcript as it was. What was computed stays cached in every case. An answer that a
  // stop string ends stays without it: the model later sees what the user saw. Throws: what rendering, encoding and
  // generate throw; failed_precondition when called from a callback of say.
  GenerateResult say(const std::string& text, const TurnOptions& turn = {});

  // As say, none of the following may be called from its callbacks: failed_precondition.

  // Takes back the last exchange (user message and answer). Returns: the user's text, or none when there is no turn.
  std::optional<std::string> undo();

  // A new conversation: new cache, empty transcript; the system prompt stays.
  void reset();

  // Changes the system prompt (none: the template's default) and starts afresh, since it stands before everything.
  void set_system_prompt(std::optional<std::string> text);

  // An independent session that shares what is cached, the points that undo goes back to included: O(layers), no row
  // is copied.
  ChatSession fork() const;

  // Writes prompt cache and transcript as one prompt-cache file, which mlx-lm can read as a prompt cache.
  // Returns: the path written. Throws: as save_prompt_cache.
  std::string save(const std::filesystem::path& file) const;

  // Replaces this conversation by a saved one, with its sampling parameters, KVCacheOptions, tools and template
  // variables; it goes on as if it had never stopped. All or nothing. Throws: as load_prompt_cache_file;
  // failed_precondition for a file without a transcript, of another model, or computed in another dtype; corrupt_data
  // for a transcript that does not fit its model or its cache.
  void load(const std::filesystem::path& file);

  const std::vector<ChatMessage>& messages() const { return state_.messages; }  // system prompt first, if there is one
  const RecordedCache& cache() const { return cache_; }
  const ChatOptions& options() const { return options_; }

 private:
  // What a conversation is, its cache apart.
  struct Transcript {
    std::vector<ChatMessage> messages;
    std::vector<Tokens> answers;              // ids of each assistant message, without the stop token
    std::vector<std::uint64_t> draws_before;  // sampler draws before each answer, to take it back with its randomness
    std::uint64_t num_draws = 0;
  };

  void check_between_turns(const char* function) const;
  Transcript new_transcript() const;
  // Remembers where the cache stands, if it could not be cut back to there later.
  void take_snapshot();
  // The ids that stand for an answer in the history.
  Tokens answer_ids(const GenerateResult& result, const std::vector<TokenId>& stop_tokens) const;
  const LoadedModel* model_;
  ChatOptions options_;
  Transcript state_;
  RecordedCache cache_;
  Snapshots snapshots_;  // of turns' beginnings and ends; empty where every layer keeps all rows
  bool in_turn_ = false;
};

}  // namespace reprise
