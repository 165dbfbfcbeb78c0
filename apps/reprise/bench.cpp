// `reprise bench`: how fast a model runs here, and where the time goes.
#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <memory>

#include "apps/reprise/bench_report.h"
#include "apps/reprise/bench_run.h"
#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "mlx/device.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu_target.h"

namespace reprise::app {
namespace {

namespace mx = mlx::core;

// Beyond it sizes would no longer fit the caches' numbers of columns, and no machine would fill them.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;

struct Flags {
  ModelFlags model;
  GenerationFlags generation;
  KVCacheFlags kv_cache;
  BenchPlan plan;
  bool json = false;
  bool profile = false;
};

void check_sizes(const BenchPlan& plan) {
  const std::int64_t tokens =
      (std::int64_t{plan.prompt} + plan.depth + plan.decode) * std::min<std::int64_t>(plan.batch, kMostTokens);
  if (tokens <= kMostTokens) return;
  throw UsageError("--prompt, --depth and --decode together must be at most " + std::to_string(kMostTokens) +
                   " tokens, all sequences of --batch counted, but got " + std::to_string(tokens));
}

int run(const Flags& flags) {
  check_sizes(flags.plan);
  const auto name = choose_model(flags.model.model);
  const auto started = std::chrono::steady_clock::now();
  const auto model = load_model(name, flags.model);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - started;

  BenchPlan plan = flags.plan;
  plan.options = finish_generation_flags(flags.generation, model);
  plan.options.kv_cache = flags.kv_cache.options;
  if (!plan.options.sampling.seed) plan.options.sampling.seed = 0;  // the same tokens each time
  Interrupts interrupts;
  plan.options.cancel = interrupts.begin_work();

  const bool gpu = mx::default_device() == mx::Device::gpu;
  BenchReport report{.model = model.path,
                     .info = model.model->info(),
                     .device = gpu ? "gpu" : "cpu",
                     .target = gpu ? "" : kernels::cpu_target(),
                     .threads = ThreadPool::process().threads(),
                     .prompt = plan.prompt,
                     .depth = plan.depth,
                     .decode = plan.decode,
                     .batch = plan.batch,
                     .load_seconds = load_time.count(),
                     .peak_memory = 0,
                     .repetitions = {},
                     .profiles = {}};
  try {
    Bench bench(model, plan);
    report.repetitions = bench.measure();
    report.peak_memory = peak_memory();
    if (flags.profile) report.profiles = bench.profile();
  } catch (const BenchCancelled&) {
    print_error("bench", "interrupted");
    return kInterrupted;
  }
  interrupts.end_work();
  write_answer(flags.json ? bench_json(report) : bench_text(report));
  return kDone;
}

void add_size_flags(CLI::App& app, BenchPlan& plan) {
  add_int_flag(app, {"--prompt", "Tokens of each sequence that are processed"}, plan.prompt, 1);
  add_int_flag(app, {"--depth", "Tokens of each sequence that are cached before"}, plan.depth, 0);
  add_int_flag(app, {"--decode", "Tokens of each sequence that are sampled after the first"}, plan.decode, 0);
  add_int_flag(app, {"--batch", "Sequences: prompts one after the other, then each step together"}, plan.batch, 1);
  add_int_flag(app, {"--repeat", "Repetitions, of which the median counts"}, plan.repeat, 1);
}

}  // namespace

void add_bench(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("bench", "Measures how fast a model runs here");
  auto flags = std::make_shared<Flags>();
  flags->kv_cache.options.quantized_kv_start = 0;
  add_model_flags(*command, flags->model);
  add_size_flags(*command, flags->plan);
  add_sampling_flags(*command, flags->generation.options.sampling);
  add_prefill_flag(*command, flags->generation.options);
  add_kv_cache_flags(*command, flags->kv_cache);
  command->add_flag("--profile", flags->profile,
                    "Says where the time goes, per operation, in repetitions of their own");
  command->add_flag("--json", flags->json, "Prints one line of JSON");
  add_bench_engine(*command, chosen);
  command->callback([command, flags, &chosen] {
    const bool engine = !command->get_subcommands().empty();
    if (!engine) chosen = [flags] { return run(*flags); };
    for (const auto* option : command->get_options()) {
      if (engine && option->count() > 0) throw UsageError("flags of bench engine stand behind the word engine");
    }
  });
}

}  // namespace reprise::app
