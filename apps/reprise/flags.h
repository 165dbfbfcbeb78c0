// The flags that several subcommands share. Names and defaults are mlx-lm's where mlx-lm has the flag.
// Threads: one.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "reprise/generate/generate.h"

namespace reprise::app {

struct FlagText {
  const char* names;
  const char* help;
};

// A flag with one value, the last of several counting; `take` may throw UsageError.
void add_flag_with_value(CLI::App& app, const FlagText& flag, const std::function<void(const std::string&)>& take);

void add_int_flag(CLI::App& app, const FlagText& flag, int& target, int least);
struct FloatRange {
  float least = 0.0f;
  float most = std::numeric_limits<float>::infinity();
};
void add_float_flag(CLI::App& app, const FlagText& flag, float& target, FloatRange range);
void add_text_flag(CLI::App& app, const FlagText& flag, std::optional<std::string>& target);

// "float32", "float16" or "bfloat16". Throws: UsageError for another text.
mlx::core::Dtype parse_dtype(const std::string& flag, const std::string& text);

struct ModelFlags {
  std::optional<std::string> model = {};
  LoadOptions load = {};
  std::optional<int> threads = {};
};
void add_model_flags(CLI::App& app, ModelFlags& flags);

// Finds and loads, with the flags' options; from then on the kernels have the flags' threads.
LoadedModel load_model(const std::string& name, const ModelFlags& flags);

// --temp, --seed and the filters between them.
void add_sampling_flags(CLI::App& app, SamplingParams& sampling);

struct GenerationFlags {
  GenerateOptions options = {};  // `stop_tokens` and XTC's special tokens wait for finish_generation_flags
  std::vector<std::string> extra_eos_tokens = {};  // texts or ids
  bool stats = false;
};
// Sampling, penalties, --max-tokens, --seed, --stop, --extra-eos-token, --prefill-step-size, --stats.
void add_generation_flags(CLI::App& app, GenerationFlags& flags);

struct KVCacheFlags {
  KVCacheOptions options = {};
  bool group_size_given = false;
};
// --kv-bits, --kv-group-size.
void add_kv_bits_flags(CLI::App& app, KVCacheFlags& flags);
// These, --max-kv-size, --quantized-kv-start.
void add_kv_cache_flags(CLI::App& app, KVCacheFlags& flags);

// --verify-reuse[=RATE].
void add_verify_flag(CLI::App& app, GenerateOptions& options);

// --prefill-step-size alone.
void add_prefill_flag(CLI::App& app, GenerateOptions& options);

// What needs the model: ids of the extra end tokens, XTC's special tokens (end tokens and the newline).
// Throws: UsageError for a token or a biased id that the model does not have.
GenerateOptions finish_generation_flags(const GenerationFlags& flags, const LoadedModel& model);

struct TemplateFlags {
  std::optional<std::string> system_prompt = {};
  std::optional<std::string> tools_file = {};
  std::string kwargs_json = {};
};
void add_template_flags(CLI::App& app, TemplateFlags& flags);
// The text of --tools FILE, or nothing. Throws: Error (not_found, invalid_argument) when it is no JSON list.
std::string read_tools(const TemplateFlags& flags);

// Flags of mlx-lm that this version does not have: naming one is an error that says so.
void add_later_flags(CLI::App& app, const std::vector<const char*>& names);
// --trust-remote-code is taken with a note, since nothing remote is ever run; --use-default-chat-template in silence.
void add_compatibility_flags(CLI::App& app);

// --prompt TEXT, `-` for standard input.
std::string read_standard_input();

}  // namespace reprise::app
