// `reprise bench engine`: how an engine that many talk to at once does over a trace.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>

#include "apps/reprise/bench_engine_report.h"
#include "apps/reprise/bench_report.h"
#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "mlx/device.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu_target.h"
#include "reprise/storage/file_system.h"

namespace reprise::app {
namespace {

namespace mx = mlx::core;

struct Flags {
  ModelFlags model;
  KVCacheFlags kv_cache;
  EngineOptions engine;
  GenerateOptions verify;  // verify_reuse
  ReplayOptions replay;
  std::string trace = "multi-turn";
  TraceOptions made;
  std::optional<std::string> export_file;
  bool no_cache = false;
  bool json = false;
  bool each_request = false;
};

Trace trace_of(const Flags& flags, const LoadedModel& model) {
  const auto& names = trace_names();
  const bool known = std::find(names.begin(), names.end(), flags.trace) != names.end();
  if (!known && std::filesystem::exists(flags.trace)) return read_trace(flags.trace, model, flags.made.answer);
  TraceOptions made = flags.made;
  made.beginning = beginning_of(model.tokenizer);
  return make_trace(flags.trace, made, tokenized_sentences(model.tokenizer, made.seed));
}

void export_trace(const std::string& file, const Trace& trace) {
  const auto lines = trace_lines(trace);
  if (file == "-") {
    write_answer(lines);
  } else {
    replace_file(file, [&lines](WritableFile& out) { out.append(std::as_bytes(std::span(lines))); });
  }
}

// So that nothing is measured that is done once for a process: weights read, kernels chosen.
void warm_up(Engine& engine, const Trace& trace) {
  const auto& tokens = trace.conversations.front().turns.front().tokens;
  Request request;
  request.prompt.assign(tokens.begin(), tokens.begin() + std::min<std::ptrdiff_t>(16, std::ssize(tokens)));
  request.max_tokens = 2;
  request.ignore_eos = true;
  request.keep = false;
  engine.submit(std::move(request)).wait();
}

int run(const Flags& flags) {
  const auto name = choose_model(flags.model.model);
  ModelFlags model_flags = flags.model;
  model_flags.load.full_fingerprint = flags.engine.cache_dir.has_value();
  const auto started = std::chrono::steady_clock::now();
  const auto model = load_model(name, model_flags);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - started;
  const auto trace = trace_of(flags, model);
  if (flags.export_file) {
    export_trace(*flags.export_file, trace);
    return kDone;
  }

  EngineOptions options = flags.engine;
  if (const auto bits = flags.kv_cache.options.kv_bits) {
    options.kv_quantization = KVQuantization{.group_size = flags.kv_cache.options.kv_group_size, .bits = *bits};
  }
  options.verify_reuse = flags.verify.verify_reuse;
  Interrupts interrupts;
  ReplayOptions replay_options = flags.replay;
  replay_options.keep = !flags.no_cache;
  replay_options.cancel = interrupts.begin_work();
  if (!replay_options.sampling.seed) replay_options.sampling.seed = flags.made.seed;

  Engine engine(model, options);
  warm_up(engine, trace);
  const auto before = engine.stats();
  const bool gpu = mx::default_device() == mx::Device::gpu;
  EngineBenchReport report{.model = model.path,
                           .info = model.model->info(),
                           .device = gpu ? "gpu" : "cpu",
                           .target = gpu ? "" : kernels::cpu_target(),
                           .threads = ThreadPool::process().threads(),
                           .load_seconds = load_time.count(),
                           .trace = trace.name,
                           .conversations = trace.conversations.size(),
                           .seed = flags.made.seed,
                           .at_a_time = replay_options.at_a_time,
                           .cache = replay_options.keep,
                           .peak_memory = 0,
                           .figures = replay(engine, trace, replay_options),
                           .engine = {},
                           .each_request = flags.each_request};
  interrupts.end_work();
  if (replay_options.cancel.stop_requested()) {
    print_error("bench engine", "interrupted");
    return kInterrupted;
  }
  if (options.cache_dir) engine.with_prefix_cache([](PrefixCache& cache) { cache.flush(); });
  report.engine = engine.stats();
  report.engine.scheduler.prefilled_tokens -= before.scheduler.prefilled_tokens;
  report.peak_memory = peak_memory();
  write_answer(flags.json ? engine_bench_json(report) : engine_bench_text(report));
  for (const auto& request : report.figures.requests) {
    if (request.error.empty()) continue;
    print_error("bench engine", "conversation " + request.conversation + ", turn " + std::to_string(request.turn) +
                                    ": " + request.error);
    return kFailed;
  }
  return kDone;
}

void add_bytes_flag(CLI::App& app, const FlagText& flag, const char* name, std::size_t& target) {
  add_flag_with_value(app, flag, [&target, name](const std::string& text) { target = parse_bytes(name, text); });
}

void add_trace_flags(CLI::App& app, Flags& flags) {
  add_flag_with_value(app,
                      {"--trace",
                       "multi-turn, shared-prefix, fork, document, edit, or a file of JSON lines "
                       "[multi-turn]"},
                      [&flags](const std::string& text) { flags.trace = text; });
  add_flag_with_value(app, {"--conversations", "Conversations at a time [4]"}, [&flags](const std::string& text) {
    flags.replay.at_a_time = parse_int("--conversations", text, 1);
    if (flags.replay.at_a_time > 1024) throw UsageError("--conversations must be at most 1024, but got " + text);
  });
  add_int_flag(app, {"--total", "Conversations of a trace that is made"}, flags.made.conversations, 1);
  add_flag_with_value(app, {"--seed", "Seed of a trace that is made, and of sampling [0]"},
                      [&flags](const std::string& text) { flags.made.seed = parse_seed("--seed", text); });
  add_flag_with_value(app, {"--scale", "Factor for the lengths of prompts of a trace that is made [1]"},
                      [&flags](const std::string& text) {
                        flags.made.scale = static_cast<double>(parse_float("--scale", text, 0.001f, 1000.0f));
                      });
  add_int_flag(app, {"-m,--max-tokens", "Tokens of each answer, unless a file says"}, flags.made.answer, 1);
  add_text_flag(app, {"--export", "Writes the trace as JSON lines of token ids there (-: standard output), no more"},
                flags.export_file);
}

void add_engine_flags(CLI::App& app, Flags& flags) {
  auto& scheduler = flags.engine.scheduler;
  add_bytes_flag(app,
                 {"--cache-bytes,--prompt-cache-bytes",
                  "Budget of keys, values and recurrent state, live and cached, "
                  "as in 500M or 2G [2 GiB]"},
                 "--cache-bytes", flags.engine.max_bytes);
  add_flag_with_value(app, {"--cache-dir", "Folder of what is cached on disk [none]"},
                      [&flags](const std::string& text) {
                        if (text.empty()) throw UsageError("--cache-dir must name a folder, but got \"\"");
                        flags.engine.cache_dir = text;
                      });
  add_bytes_flag(app, {"--cache-dir-bytes", "Budget of that folder [8 GiB]"}, "--cache-dir-bytes",
                 flags.engine.max_disk_bytes);
  add_int_flag(app, {"--checkpoint-every", "Tokens between stored states of models that need them"},
               scheduler.checkpoint_every, 1);
  add_int_flag(app, {"--prefill-step-size", "Tokens of a prompt processed between two steps of the others"},
               scheduler.prefill_step_size, 1);
  add_int_flag(app, {"--max-batch", "Requests that are answered at a time"}, scheduler.max_batch, 1);
  add_kv_bits_flags(app, flags.kv_cache);
  add_verify_flag(app, flags.verify);
  app.add_flag("--no-cache", flags.no_cache, "Keeps nothing: each prompt is computed from nothing");
}

}  // namespace

void add_bench_engine(CLI::App& bench, Action& chosen) {
  auto* command = bench.add_subcommand("engine", "Replays many conversations at once");
  auto flags = std::make_shared<Flags>();
  add_model_flags(*command, flags->model);
  add_trace_flags(*command, *flags);
  add_engine_flags(*command, *flags);
  add_float_flag(*command, {"--temp", "Temperature; 0 takes the likeliest token"}, flags->replay.sampling.temperature,
                 {});
  command->add_flag("--json", flags->json, "Prints one line of JSON");
  command->add_flag("--each-request", flags->each_request, "With --json: every request as well");
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
