// What it costs to keep a prompt cache in a file and to take it back, beside what it costs to compute it.
// usage: save_load [--model MODEL] [--tokens 2000] [--repeat 3] [--threads 2] [--folder .]
// Without --model: $REPRISE_MODEL, else what ./run has fetched. Saving includes the check of what was written and
// fsync; loading includes all checks. Medians.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "bench/flags.h"
#include "bench/timing.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/generate.h"

namespace {

using namespace reprise;
using namespace reprise::bench;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string model_of(const Flags& flags) {
  for (const auto& name : {flags.text("model"), environment("REPRISE_MODEL"), environment("REPRISE_FETCHED_MODEL")}) {
    if (!name.empty()) return name;
  }
  throw Error(ErrorCode::not_found, "no model was named: use --model MODEL or set REPRISE_MODEL");
}

int run(const Flags& flags) {
  ThreadPool::set_process_threads(flags.number("threads"));
  const auto model = load(model_of(flags));
  std::mt19937 random(0);
  std::uniform_int_distribution<TokenId> id(0, model.model->info().vocab_size - 1);
  Tokens tokens(static_cast<std::size_t>(flags.number("tokens")));
  for (auto& token : tokens) token = id(random);

  const auto file = (std::filesystem::path(flags.text("folder")) / "save_load_bench.safetensors").string();
  std::vector<double> prefill;
  std::vector<double> save;
  std::vector<double> load;
  std::uintmax_t bytes = 0;
  for (int i = 0; i < flags.number("repeat"); ++i) {
    RecordedCache cache{model.model->make_cache(), {}};
    prefill.push_back(seconds_of([&] { generate(model, tokens, cache, {.max_tokens = 0}); }));
    const SaveOptions options{.extension = {.tokens = cache.tokens, .model_fingerprint = model.fingerprint}};
    save.push_back(seconds_of([&] { save_prompt_cache(file, cache.cache, {}, options); }));
    bytes = std::filesystem::file_size(file);
    load.push_back(seconds_of([&] { load_prompt_cache_file(file); }));
    std::filesystem::remove(file);
  }
  std::printf("{\"tokens\": %zu, \"bytes\": %ju, \"prefill_s\": %.4f, \"save_s\": %.4f, \"load_s\": %.4f}\n",
              tokens.size(), bytes, median(prefill), median(save), median(load));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags({{"model", ""}, {"tokens", "2000"}, {"repeat", "3"}, {"threads", "2"}, {"folder", "."}});
  if (!flags.read(argc, argv)) return 2;
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "save_load: %s\n", error.what());
    return 1;
  }
}
