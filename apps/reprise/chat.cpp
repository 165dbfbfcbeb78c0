// `reprise chat`: a conversation on the terminal or through a pipe.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "apps/reprise/cache_file_name.h"
#include "apps/reprise/chat_commands.h"
#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/line_reader.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/output.h"
#include "apps/reprise/progress.h"
#include "apps/reprise/utf8.h"
#include "reprise/base/error.h"
#include "reprise/generate/chat_session.h"

namespace reprise::app {
namespace {

struct Flags {
  ModelFlags model;
  GenerationFlags generation;
  TemplateFlags chat_template;
  KVCacheFlags kv_cache;
};

// A leading ~/ as shells read it.
std::string expand_home(const std::string& file) {
  const char* home = std::getenv("HOME");
  return file.starts_with("~/") && home != nullptr ? home + file.substr(1) : file;
}

// What was asked for, layer by layer; also where it is no longer what it was.
void report_kv_cache(const LoadedModel& model, const ChatSession& session, const KVCacheOptions& before = {}) {
  const auto& options = session.options().generate.kv_cache;
  if (options == KVCacheOptions() && options == before) return;
  print_note(summarize_layers(plan_kv_cache(*model.model, session.cache().cache, options)));
}

class Chat {
 public:
  Chat(const LoadedModel& model, ChatSession& session, Interrupts& interrupts, LineReader& reader, bool prints_stats)
      : model_(model), session_(session), interrupts_(interrupts), reader_(reader), prints_stats_(prints_stats) {}

  int run() {
    for (;;) {
      const auto input = reader_.read();
      if (input.kind == Input::Kind::end) break;
      if (input.kind == Input::Kind::interrupted) {
        if (interrupts_.count() >= 2) return reader_.is_interactive() ? kDone : kInterrupted;
        print_note("(Ctrl-C once more or /quit leaves)");
        continue;
      }
      // A pipe's lines come without anybody having read the answer before: two interrupts are two in a row, however far
      // apart.
      if (reader_.is_interactive()) interrupts_.reset();
      if (!take(input.text)) break;
      if (!reader_.is_interactive() && interrupts_.count() >= 2) return kInterrupted;
    }
    // A person has seen the errors; a script looks at the exit code.
    return failed_ && !reader_.is_interactive() ? kFailed : kDone;
  }

 private:
  // Returns: false when the chat is over.
  bool take(const std::string& line) {
    try {
      if (!is_valid_utf8(line)) throw Error(ErrorCode::invalid_argument, "the line is not UTF-8: it is left out");
      const auto input = parse_chat_input(line);
      if (input.command == ChatCommand::quit) return false;
      if (input.command == ChatCommand::message) {
        answer(input.text);
      } else {
        obey(input);
      }
    } catch (const OutputClosed&) {
      throw;
    } catch (const std::exception& error) {
      failed_ = true;
      print_error("chat", error.what());
    }
    return true;
  }

  void answer(const std::string& text) {
    bool written = false;
    TurnOptions turn;
    turn.on_progress = [this](int done, int total) {
      progress_.update(done, total);
      if (done == total) progress_.finish();
    };
    turn.on_text = [&](std::string_view piece) {
      progress_.finish();
      written = true;
      write_answer(piece);
    };
    turn.cancel = interrupts_.begin_work();
    try {
      last_ = session_.say(text, turn);
    } catch (const OutputClosed&) {
      end_answer();
      throw;
    } catch (...) {
      end_answer();
      if (written) write_answer("\n");
      throw;
    }
    end_answer();
    write_answer("\n");
    if (last_->finish_reason == FinishReason::cancelled) {
      print_note(last_->tokens.empty() ? "(stopped before the answer: the message is taken back)" : "(stopped)");
    }
    if (last_->finish_reason == FinishReason::length && reader_.is_interactive()) {
      print_note("(cut off after " + std::to_string(last_->stats.completion_tokens) + " tokens: --max-tokens)");
    }
    if (prints_stats_) print_note(stats_line(last_->stats));
  }

  void end_answer() {
    interrupts_.end_work();
    progress_.finish();
  }

  void obey(const ChatInput& input) {
    switch (input.command) {
      case ChatCommand::help:
        write_note(chat_help());
        break;
      case ChatCommand::reset:
        session_.reset();
        print_note("a new conversation");
        break;
      case ChatCommand::undo:
        undo();
        break;
      case ChatCommand::system:
        session_.set_system_prompt(input.text.empty() ? std::nullopt : std::optional(input.text));
        print_note(input.text.empty() ? "no system prompt; a new conversation" : "a new conversation");
        break;
      case ChatCommand::save:
        need_file(input, "/save");
        print_note("saved " + session_.save(cache_file_name("/save", expand_home(input.text))));
        break;
      case ChatCommand::load:
        load(input);
        break;
      case ChatCommand::stats:
        print_note(describe());
        if (last_) print_note(describe_last());
        break;
      case ChatCommand::unknown:
        throw Error(ErrorCode::invalid_argument,
                    "there is no command " + input.text + ": /help lists them, //TEXT sends /TEXT to the model");
      case ChatCommand::message:
      case ChatCommand::nothing:
      case ChatCommand::quit:
        break;
    }
  }

  static void need_file(const ChatInput& input, const std::string& command) {
    if (input.text.empty()) throw Error(ErrorCode::invalid_argument, command + " needs the name of a file");
  }

  void load(const ChatInput& input) {
    need_file(input, "/load");
    const auto before = session_.options().generate.kv_cache;
    session_.load(cache_file_name("/load", expand_home(input.text)));
    last_.reset();
    print_note("loaded " + describe());
    report_kv_cache(model_, session_, before);
  }

  void undo() {
    const auto text = session_.undo();
    last_.reset();
    print_note(text ? "took back: " + one_line(*text) : "there is nothing to take back");
  }

  std::string describe() const {
    int turns = 0;
    for (const auto& message : session_.messages()) turns += message.role == "user";
    const auto& cache = session_.cache();
    char text[128];
    std::snprintf(text, sizeof text, "%d turn%s, %zu tokens cached in %.1f MB", turns, turns == 1 ? "" : "s",
                  cache.tokens.size(), static_cast<double>(prompt_cache_nbytes(cache.cache)) / 1e6);
    return text;
  }

  std::string describe_last() const {
    const auto& stats = last_->stats;
    char text[256];
    std::snprintf(text, sizeof text,
                  "last answer: %d tokens of prompt (%d of them cached), %d of answer; first token after %.0f ms, "
                  "prefill %.1f and decode %.1f tokens per second",
                  stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
                  stats.time_to_first_token.count() * 1000, stats.prefill_tps(), stats.decode_tps());
    return text;
  }

  const LoadedModel& model_;
  ChatSession& session_;
  Interrupts& interrupts_;
  LineReader& reader_;
  const bool prints_stats_;
  Progress progress_{"prefill"};
  std::optional<GenerateResult> last_;
  bool failed_ = false;
};

// As llama.cpp does it. Prompts begin as the tokenizer lets a text begin.
void take_chatml(LoadedModel& model) {
  std::string bos;
  for (const TokenId id : model.tokenizer.encode("", {.add_special_tokens = true})) {
    if (id == model.tokenizer.bos_token_id()) bos = model.tokenizer.id_to_token(id).value_or("");
  }
  model.chat_template = ChatTemplate::chatml(bos);
  print_note("the model has no chat template: its prompts are written as ChatML");
}

int run(const Flags& flags) {
  ChatOptions options{.system_prompt = flags.chat_template.system_prompt,
                      .tools_json = read_tools(flags.chat_template),
                      .kwargs_json = flags.chat_template.kwargs_json};
  const auto name = choose_model(flags.model.model);
  auto model = load_model(name, flags.model);
  const bool has_template = model.chat_template.has_value();
  if (!has_template) take_chatml(model);
  options.generate = finish_generation_flags(flags.generation, model);
  // To a vocabulary that does not know it, it is a text like any other.
  if (!has_template) options.generate.stop.emplace_back("<|im_end|>");
  options.generate.kv_cache = flags.kv_cache.options;
  ChatSession session(model, options);
  report_kv_cache(model, session);

  Interrupts interrupts;
  auto reader = make_terminal_line_reader(interrupts);
  if (reader == nullptr) reader = make_pipe_line_reader(interrupts);
  if (reader->is_interactive()) print_note(name + " (/help lists the commands, /quit leaves)");
  return Chat(model, session, interrupts, *reader, flags.generation.stats).run();
}

}  // namespace

void add_chat(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("chat", "Talks with a model; each turn computes only what is new");
  auto flags = std::make_shared<Flags>();
  flags->generation.options.sampling.seed = 0;
  add_model_flags(*command, flags->model);
  add_template_flags(*command, flags->chat_template);
  add_generation_flags(*command, flags->generation);
  add_kv_cache_flags(*command, flags->kv_cache);
  add_verify_flag(*command, flags->generation.options);
  add_compatibility_flags(*command);
  add_later_flags(*command, {"--draft-model", "--num-draft-tokens", "--pipeline"});
  command->footer("\nCommands in the chat:\n" + chat_help());
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
