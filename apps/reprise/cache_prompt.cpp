// `reprise cache-prompt`: processes a prompt once and keeps what the model remembers of it in a file.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/reprise/cache_file_name.h"
#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/output.h"
#include "apps/reprise/progress.h"
#include "apps/reprise/prompt.h"
#include "mlx/memory.h"
#include "reprise/base/error.h"

namespace reprise::app {
namespace {

struct Flags {
  ModelFlags model;
  TemplateFlags chat_template;
  KVCacheFlags kv_cache;
  GenerateOptions generate;
  std::string prompt;
  std::string prompt_cache_file;
  std::optional<std::string> eos_token;
  PromptCacheLayout layout = PromptCacheLayout::current;
  bool portable = false;
};

// The file cannot be written after minutes of work: better to know before.
void check_target(const std::string& file) {
  const auto folder = std::filesystem::absolute(file).parent_path();
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) {
    throw Error(ErrorCode::not_found, "there is no folder " + folder.string() + " for the prompt cache");
  }
  if (std::filesystem::is_directory(file, ignored)) {
    throw Error(ErrorCode::invalid_argument, "the prompt cache needs a file's name, but " + file + " is a folder");
  }
}

// mlx-lm reads these as arguments of its tokenizer.
std::string tokenizer_config(const Flags& flags, const LoadedModel& model) {
  auto config = nlohmann::json::parse(model.tokenizer_config_json, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) config = nlohmann::json::object();
  config["trust_remote_code"] = false;
  if (flags.eos_token) config["eos_token"] = *flags.eos_token;
  return config.dump();
}

// A path holds from wherever the file is used; a hub id stays.
std::string lasting_name(const std::string& name) {
  std::error_code ignored;
  if (!std::filesystem::exists(name, ignored)) return name;
  return std::filesystem::absolute(name).lexically_normal().string();
}

std::string save(const Flags& flags, const std::string& name, const LoadedModel& model, const RecordedCache& cache,
                 const PromptRecord& record) {
  SaveOptions options{.layout = flags.layout, .portable = flags.portable};
  if (flags.layout == PromptCacheLayout::current) {
    options.extension = {
        .tokens = cache.tokens, .model_fingerprint = model.fingerprint, .app_json = prompt_record_to_json(record)};
  }
  return save_prompt_cache(flags.prompt_cache_file, cache.cache,
                           {{"model", lasting_name(name)}, {"tokenizer_config", tokenizer_config(flags, model)}},
                           options);
}

int run(const Flags& flags) {
  check_target(flags.prompt_cache_file);
  const PromptRequest request{.prompt = flags.prompt == "-" ? read_standard_input() : flags.prompt,
                              .system_prompt = flags.chat_template.system_prompt,
                              .tools_json = read_tools(flags.chat_template),
                              .kwargs_json = flags.chat_template.kwargs_json};
  const auto name = choose_model(flags.model.model);
  const auto model = load_model(name, flags.model);
  if (flags.eos_token && !model.tokenizer.token_to_id(*flags.eos_token)) {
    throw UsageError("--eos-token must be a token of the model, but got \"" + *flags.eos_token + "\"");
  }
  const auto ids = encode_open_prompt(model, request);

  Interrupts interrupts;
  Progress progress("prefill");
  auto options = flags.generate;
  options.max_tokens = 0;
  options.kv_cache = flags.kv_cache.options;
  options.cancel = interrupts.begin_work();
  options.on_progress = [&](int done, int total) { progress.update(done, total); };
  RecordedCache cache{make_prompt_cache(*model.model, options.kv_cache.max_kv_size), {}};
  const auto layers = plan_kv_cache(*model.model, cache.cache, options.kv_cache);
  if (options.kv_cache != KVCacheOptions()) print_note(summarize_layers(layers));
  const auto result = generate(model, ids, cache, options);
  interrupts.end_work();
  progress.finish();
  if (result.finish_reason == FinishReason::cancelled) {
    print_error("cache-prompt", "interrupted: nothing is saved");
    return kInterrupted;
  }
  char text[128];
  std::snprintf(text, sizeof text, "Processed %d tokens (%.2f tokens-per-sec)\nPeak memory: %.3f GB",
                result.stats.prompt_tokens, result.stats.prefill_tps(),
                static_cast<double>(mlx::core::get_peak_memory()) / 1e9);
  print_note(text);
  PromptRecord record = record_of(model, request);
  record.pieces = cache.pieces;
  if (options.kv_cache.kv_bits) record.quantized_kv_start = options.kv_cache.quantized_kv_start;
  print_note("Saved " + save(flags, name, model, cache, record));
  return kDone;
}

}  // namespace

void add_cache_prompt(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("cache-prompt", "Processes a prompt and saves its cache for `generate`");
  auto flags = std::make_shared<Flags>();
  add_model_flags(*command, flags->model);
  command
      ->add_option("--prompt,-p", flags->prompt,
                   "The beginning of the user's message, as it is (\\n and \\t stay); - reads it from standard input")
      ->required()
      ->type_name("");
  command
      ->add_option_function<std::string>(
          "--prompt-cache-file",
          [flags](const std::string& text) { flags->prompt_cache_file = cache_file_name("--prompt-cache-file", text); },
          "The file to save to (.safetensors)")
      ->required()
      ->type_name("");
  add_text_flag(*command, {"--eos-token", "A token that ends answers, recorded in the file"}, flags->eos_token);
  add_flag_with_value(
      *command,
      {"--cache-format",
       "current; portable, which mlx-lm reads whatever the kinds of the caches are; or legacy, the same "
       "for mlx-lm before 0.32 and mlx-swift-lm [current]"},
      [flags](const std::string& text) {
        if (text != "current" && text != "portable" && text != "legacy") {
          throw UsageError("--cache-format must be current, portable or legacy, but got \"" + text + "\"");
        }
        flags->layout = text == "legacy" ? PromptCacheLayout::legacy : PromptCacheLayout::current;
        flags->portable = text != "current";
      });
  add_template_flags(*command, flags->chat_template);
  add_prefill_flag(*command, flags->generate);
  add_kv_cache_flags(*command, flags->kv_cache);
  add_compatibility_flags(*command);
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
