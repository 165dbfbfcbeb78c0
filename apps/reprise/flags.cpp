#include "apps/reprise/flags.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "apps/reprise/utf8.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/storage/file_system.h"

namespace reprise::app {
namespace {

// "--temp" of "-t,--temp": what error messages call the flag.
std::string long_name(const FlagText& flag) {
  const std::string names = flag.names;
  return names.substr(names.find("--"));
}

void add_penalty_flags(CLI::App& app, SamplingParams& sampling) {
  add_float_flag(app, {"--repetition-penalty", "Makes tokens of the context less likely; 0 and 1: off"},
                 sampling.repetition_penalty, {});
  add_int_flag(app, {"--repetition-context-size", "Tokens looked back at"}, sampling.repetition_context_size, 0);
  const FloatRange any = {-std::numeric_limits<float>::infinity()};
  add_float_flag(app, {"--presence-penalty", "Subtracted once from each token of the context"},
                 sampling.presence_penalty, any);
  add_int_flag(app, {"--presence-context-size", "Tokens looked back at"}, sampling.presence_context_size, 0);
  add_float_flag(app, {"--frequency-penalty", "Subtracted once per occurrence in the context"},
                 sampling.frequency_penalty, any);
  add_int_flag(app, {"--frequency-context-size", "Tokens looked back at"}, sampling.frequency_context_size, 0);
  add_flag_with_value(
      app, {"--logit-bias", "JSON object: {\"TOKEN_ID\": BIAS, …}, added to the logits"},
      [&sampling](const std::string& text) { sampling.logit_bias = parse_logit_bias("--logit-bias", text); });
}

TokenId find_token(const Tokenizer& tokenizer, const std::string& text) {
  int id = -1;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), id);
  const bool is_number = !text.empty() && result.ec == std::errc() && result.ptr == text.data() + text.size();
  if (!is_number) {
    if (const auto found = tokenizer.token_to_id(text)) return *found;
  } else if (id >= 0 && static_cast<std::size_t>(id) < tokenizer.vocab_size()) {
    return id;
  }
  throw UsageError("--extra-eos-token must name a token of the model, but got \"" + text + "\"");
}

}  // namespace

mlx::core::Dtype parse_dtype(const std::string& flag, const std::string& text) {
  if (text == "float32") return mlx::core::float32;
  if (text == "float16") return mlx::core::float16;
  if (text == "bfloat16") return mlx::core::bfloat16;
  throw UsageError(flag + " must be float32, float16 or bfloat16, but got \"" + text + "\"");
}

void add_flag_with_value(CLI::App& app, const FlagText& flag, const std::function<void(const std::string&)>& take) {
  app.add_option_function<std::string>(flag.names, take, flag.help)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->type_name("");
}

void add_int_flag(CLI::App& app, const FlagText& flag, int& target, int least) {
  const auto name = long_name(flag);
  const std::string help = std::string(flag.help) + " [" + std::to_string(target) + "]";
  add_flag_with_value(app, {flag.names, help.c_str()},
                      [&target, name, least](const std::string& text) { target = parse_int(name, text, least); });
}

void add_float_flag(CLI::App& app, const FlagText& flag, float& target, FloatRange range) {
  const auto name = long_name(flag);
  std::ostringstream help;
  help << flag.help << " [" << target << "]";
  add_flag_with_value(app, {flag.names, help.str().c_str()}, [&target, name, range](const std::string& text) {
    target = parse_float(name, text, range.least, range.most);
  });
}

void add_text_flag(CLI::App& app, const FlagText& flag, std::optional<std::string>& target) {
  add_flag_with_value(app, flag, [&target](const std::string& text) { target = text; });
}

void add_model_flags(CLI::App& app, ModelFlags& flags) {
  add_flag_with_value(app, {"--model", "A folder, a .gguf file, or a hub id in the local cache [$REPRISE_MODEL]"},
                      [&flags](const std::string& text) {
                        if (text.empty()) throw UsageError("--model must name a model, but got \"\"");
                        flags.model = text;
                      });
  add_flag_with_value(app, {"--adapter-path", "A folder with a LoRA or DoRA adapter that mlx-lm has trained"},
                      [&flags](const std::string& text) {
                        if (text.empty()) throw UsageError("--adapter-path must name a folder, but got \"\"");
                        flags.load.adapter = text;
                      });
  add_flag_with_value(
      app, {"--dtype", "Computes in float32, float16 or bfloat16 [float32 on a CPU]"},
      [&flags](const std::string& text) { flags.load.model.compute_dtype = parse_dtype("--dtype", text); });
  add_flag_with_value(
      app, {"--kv-dtype", "Keeps keys and values in float32, float16 or bfloat16 [float16 on a CPU]"},
      [&flags](const std::string& text) { flags.load.model.kv_dtype = parse_dtype("--kv-dtype", text); });
  add_flag_with_value(app, {"--threads", "Threads of the CPU kernels [$REPRISE_NUM_THREADS, else all processors]"},
                      [&flags](const std::string& text) {
                        const int threads = parse_int("--threads", text, 1);
                        if (threads > 1024) throw UsageError("--threads must be at most 1024, but got " + text);
                        flags.threads = threads;
                      });
}

LoadedModel load_model(const std::string& name, const ModelFlags& flags) {
  if (flags.threads) ThreadPool::set_process_threads(*flags.threads);
  // A saved chat names its model: the path must hold from wherever it is read.
  return load(std::filesystem::absolute(resolve_model(name)).lexically_normal(), flags.load);
}

void add_kv_bits_flags(CLI::App& app, KVCacheFlags& flags) {
  KVCacheOptions& options = flags.options;
  add_flag_with_value(app, {"--kv-bits", "Quantises keys and values to 2, 3, 4, 5, 6 or 8 bits [not at all]"},
                      [&options](const std::string& text) {
                        options.kv_bits = parse_choice("--kv-bits", text, {2, 3, 4, 5, 6, 8});
                      });
  add_flag_with_value(app, {"--kv-group-size", "Numbers that are quantised together: 32, 64 or 128 [64]"},
                      [&flags](const std::string& text) {
                        flags.options.kv_group_size = parse_choice("--kv-group-size", text, {32, 64, 128});
                        flags.group_size_given = true;
                      });
}

void add_kv_cache_flags(CLI::App& app, KVCacheFlags& flags) {
  KVCacheOptions& options = flags.options;
  add_flag_with_value(
      app, {"--max-kv-size", "Tokens kept per layer: the first 4 and the most recent others, 5 or more [all]"},
      [&options](const std::string& text) { options.max_kv_size = parse_int("--max-kv-size", text, 5); });
  add_kv_bits_flags(app, flags);
  add_int_flag(app, {"--quantized-kv-start", "With --kv-bits: quantises once so many tokens are cached"},
               options.quantized_kv_start, 0);
}

void add_verify_flag(CLI::App& app, GenerateOptions& options) {
  app.add_option_function<std::vector<std::string>>(
         "--verify-reuse",
         [&options](const std::vector<std::string>& values) {
           const bool has_rate = !values.empty() && !values.back().empty();
           options.verify_reuse =
               has_rate ? static_cast<double>(parse_float("--verify-reuse", values.back(), 0, 1)) : 1.0;
         },
         "Computes again from nothing what was reused, in this part of the answers, and compares [0; 1 without a "
         "value]")
      ->expected(0, 1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->type_name("");
}

void add_prefill_flag(CLI::App& app, GenerateOptions& options) {
  add_flag_with_value(
      app, {"--prefill-step-size", "Tokens of the prompt processed at a time [2048; 256 on a CPU]"},
      [&options](const std::string& text) { options.prefill_step_size = parse_int("--prefill-step-size", text, 1); });
}

void add_sampling_flags(CLI::App& app, SamplingParams& sampling) {
  add_float_flag(app, {"--temp", "Temperature; 0 takes the likeliest token"}, sampling.temperature, {});
  add_float_flag(app, {"--top-p", "Keeps the likeliest tokens of this total probability; 0 and 1 keep all"},
                 sampling.top_p, {0, 1});
  add_float_flag(app, {"--min-p", "Keeps tokens at least so likely, as a part of the likeliest; 0 keeps all"},
                 sampling.min_p, {0, 1});
  add_int_flag(app, {"--top-k", "Keeps the K likeliest tokens; 0 keeps all"}, sampling.top_k, 0);
  add_float_flag(app, {"--xtc-probability", "Chance per token that XTC acts"}, sampling.xtc_probability, {0, 1});
  add_float_flag(app, {"--xtc-threshold", "Probability above which XTC drops all tokens but the least likely"},
                 sampling.xtc_threshold, {0, 0.5f});
  add_int_flag(app, {"--min-tokens-to-keep", "Tokens that --min-p leaves at least"}, sampling.min_tokens_to_keep, 1);
  add_flag_with_value(app, {"--seed", "Seed of the random numbers"},
                      [&sampling](const std::string& text) { sampling.seed = parse_seed("--seed", text); });
}

void add_generation_flags(CLI::App& app, GenerationFlags& flags) {
  GenerateOptions& options = flags.options;
  add_int_flag(app, {"-m,--max-tokens", "Longest answer, in tokens"}, options.max_tokens, 0);
  add_sampling_flags(app, options.sampling);
  add_penalty_flags(app, options.sampling);
  app.add_option_function<std::vector<std::string>>(
         "--stop",
         [&options](const std::vector<std::string>& texts) {
           for (const auto& text : texts) {
             if (text.empty() || !is_valid_utf8(text)) {
               throw UsageError("--stop must be a text in UTF-8, but got \"" + text + "\"");
             }
             options.stop.push_back(unescape(text));
           }
         },
         "Ends the answer where this text begins; may be given several times")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("");
  app.add_option("--extra-eos-token", flags.extra_eos_tokens, "Tokens (texts or ids) that end the answer too")
      ->type_name("");
  add_prefill_flag(app, options);
  app.add_flag("--stats", flags.stats, "Prints one line of figures to standard error after each answer");
}

GenerateOptions finish_generation_flags(const GenerationFlags& flags, const LoadedModel& model) {
  const Tokenizer& tokenizer = model.tokenizer;
  GenerateOptions options = flags.options;
  for (const auto& [id, bias] : options.sampling.logit_bias) {
    if (id >= model.model->info().vocab_size) {
      throw UsageError("--logit-bias must name token ids below " + std::to_string(model.model->info().vocab_size) +
                       ", but got " + std::to_string(id));
    }
  }
  for (const auto& text : flags.extra_eos_tokens) options.stop_tokens.push_back(find_token(tokenizer, text));
  auto& special = options.sampling.xtc_special_tokens;
  special = tokenizer.encode("\n");
  special.insert(special.end(), tokenizer.eos_token_ids().begin(), tokenizer.eos_token_ids().end());
  special.insert(special.end(), options.stop_tokens.begin(), options.stop_tokens.end());
  return options;
}

void add_template_flags(CLI::App& app, TemplateFlags& flags) {
  add_text_flag(app, {"--system-prompt", "The system message"}, flags.system_prompt);
  add_flag_with_value(app, {"--chat-template-config", "JSON object of further variables for the chat template"},
                      [&flags](const std::string& text) {
                        flags.kwargs_json = check_template_variables("--chat-template-config", text);
                      });
  add_text_flag(app, {"--tools", "File with a JSON list of tools the model may call"}, flags.tools_file);
}

std::string read_tools(const TemplateFlags& flags) {
  if (!flags.tools_file) return {};
  auto text = read_file(*flags.tools_file);
  if (!nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false).is_array()) {
    throw Error(ErrorCode::invalid_argument, "--tools must name a file with a JSON list, but got " + *flags.tools_file);
  }
  return text;
}

void add_later_flags(CLI::App& app, const std::vector<const char*>& names) {
  for (const char* name : names) {
    const std::string long_form = long_name({name, ""});
    auto* option = app.add_option_function<std::vector<std::string>>(
        name, [long_form](const std::vector<std::string>&) { throw UsageError(long_form + " is not supported yet"); },
        "");
    option->expected(0, 1)->group("");  // an empty group hides it from --help
  }
}

void add_compatibility_flags(CLI::App& app) {
  app.add_flag_callback(
         "--trust-remote-code",
         [] {
           print_note("reprise: --trust-remote-code does nothing here: code from a model's repository is never run");
         },
         "")
      ->group("");
  // mlx-lm parses it and does not read it either.
  app.add_flag_callback(
         "--use-default-chat-template", [] {}, "")
      ->group("");
}

std::string read_standard_input() {
  return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
}

}  // namespace reprise::app
