// `reprise generate`: one prompt, one answer.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/reprise/cache_file_name.h"
#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "apps/reprise/progress.h"
#include "apps/reprise/prompt.h"
#include "mlx/memory.h"
#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise::app {
namespace {

struct Flags {
  ModelFlags model;
  GenerationFlags generation;
  TemplateFlags chat_template;
  KVCacheFlags kv_cache;
  std::string prompt = "hello";
  std::optional<std::string> prefill_response;
  std::optional<std::string> prompt_cache_file;
  bool ignore_chat_template = false;
  bool verbose = true;
};

// The end token that the cache was made with ends this answer too.
void take_tokenizer_settings(const LoadedPromptCache& stored, const LoadedModel& model, GenerateOptions& options) {
  const auto found = stored.metadata.find("tokenizer_config");
  if (found == stored.metadata.end()) return;
  const auto config = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || !config.contains("eos_token") || !config["eos_token"].is_string()) return;
  const auto id = model.tokenizer.token_to_id(config["eos_token"].get<std::string>());
  if (id) options.stop_tokens.push_back(*id);
}

LoadedPromptCache load_stored_prompt(const std::string& file) {
  auto stored = load_prompt_cache_file(file);
  if (!is_chat_record(stored.extension.app_json)) return stored;
  throw Error(ErrorCode::failed_precondition,
              file + " holds a saved chat, not a prompt: `/load` in `reprise chat` goes on with it");
}

void print_summary(const GenerateStats& stats) {
  char text[256];
  std::snprintf(text, sizeof text,
                "Prompt: %d tokens (%d cached), %.3f tokens-per-sec\nGeneration: %d tokens, %.3f tokens-per-sec\n"
                "Peak memory: %.3f GB",
                stats.prompt_tokens, stats.cached_tokens, stats.prefill_tps(), stats.completion_tokens,
                stats.decode_tps(), static_cast<double>(mlx::core::get_peak_memory()) / 1e9);
  print_note(text);
}

int run(const Flags& flags) {
  const auto prompt = unescape(flags.prompt);
  const PromptRequest request{.prompt = prompt == "-" ? read_standard_input() : prompt,
                              .system_prompt = flags.chat_template.system_prompt,
                              .prefill_response = flags.prefill_response,
                              .ignore_chat_template = flags.ignore_chat_template,
                              .tools_json = read_tools(flags.chat_template),
                              .kwargs_json = flags.chat_template.kwargs_json};
  std::optional<LoadedPromptCache> stored;
  if (flags.prompt_cache_file) stored = load_stored_prompt(*flags.prompt_cache_file);
  const auto name = stored ? model_of_cache(*stored, flags.model.model) : choose_model(flags.model.model);
  const auto model = load_model(name, flags.model);
  auto options = finish_generation_flags(flags.generation, model);

  options.kv_cache = stored ? kv_cache_of(*stored, model, flags.kv_cache) : flags.kv_cache.options;
  ContinuedPrompt prepared{{make_prompt_cache(*model.model, options.kv_cache.max_kv_size), {}}, {}};
  if (stored) {
    check_model_of_cache(*stored, model);
    warn_of_other_dtype(*stored, model);
    take_tokenizer_settings(*stored, model, options);
    prepared = continue_prompt(std::move(*stored), model, request, options.kv_cache);
    if (!prepared.tokens_known && options.verify_reuse > 0) {
      log(LogLevel::warning,
          "--verify-reuse does nothing here: what the file does not record cannot be computed again");
      options.verify_reuse = 0;
    }
  } else {
    prepared.ids = encode_prompt(model, request);
  }

  const auto layers = plan_kv_cache(*model.model, prepared.cache.cache, options.kv_cache);
  if (options.kv_cache != KVCacheOptions() && (flags.verbose || flags.generation.stats)) {
    print_note(summarize_layers(layers));
  }

  Interrupts interrupts;
  Progress progress("prefill");
  options.cancel = interrupts.begin_work();
  options.on_progress = [&](int done, int total) {
    progress.update(done, total);
    if (done == total) progress.finish();
  };
  if (flags.verbose) {
    options.on_text = [&](std::string_view text) {
      progress.finish();
      write_answer(text);
    };
  }
  const auto result = generate(model, prepared.ids, prepared.cache, options);
  interrupts.end_work();
  progress.finish();
  write_answer(flags.verbose ? "\n" : result.text + "\n");
  if (flags.verbose) print_summary(result.stats);
  if (flags.generation.stats) print_note(stats_line(result.stats));
  return result.finish_reason == FinishReason::cancelled ? kInterrupted : kDone;
}

}  // namespace

void add_generate(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("generate", "Answers one prompt");
  auto flags = std::make_shared<Flags>();
  flags->generation.options.max_tokens = 100;
  add_model_flags(*command, flags->model);
  add_flag_with_value(
      *command,
      {"-p,--prompt",
       "The user's message (\\n and \\t become newline and tab); - reads it from standard input [hello]"},
      [flags](const std::string& text) { flags->prompt = text; });
  add_text_flag(*command, {"--prefill-response", "Beginning of the answer, which the model continues"},
                flags->prefill_response);
  add_flag_with_value(
      *command, {"--prompt-cache-file", "Continues the prompt that cache-prompt stored in this file"},
      [flags](const std::string& text) { flags->prompt_cache_file = cache_file_name("--prompt-cache-file", text); });
  command->add_flag("--ignore-chat-template", flags->ignore_chat_template, "Takes the prompt as plain text");
  add_flag_with_value(*command, {"--verbose", "false: prints the answer only, when it is complete [true]"},
                      [flags](const std::string& text) { flags->verbose = str2bool(text); });
  add_template_flags(*command, flags->chat_template);
  add_generation_flags(*command, flags->generation);
  add_kv_cache_flags(*command, flags->kv_cache);
  add_verify_flag(*command, flags->generation.options);
  add_compatibility_flags(*command);
  add_later_flags(*command, {"--draft-model", "--num-draft-tokens", "-q,--quantize-activations", "--image"});
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
