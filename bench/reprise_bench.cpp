// Prefill and decode speed as one JSON line, by the conventions of the peers' benchmarks: token ids are random but
// fixed; prefill is all but the last token, then one step; the sampler is part of every step. usage: reprise_bench
// MODEL [--prompt 64] [--depth 0] [--decode 16] [--repeat 1] [--temp 0] [--top-p 1]
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "mlx/device.h"
#include "reprise/generate/generate.h"

namespace {

using namespace reprise;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

bool read_flags(int argc, char** argv, std::map<std::string, double>& flags) {
  if (argc < 2 || argc % 2 != 0) return false;
  for (int i = 2; i < argc; i += 2) {
    const auto flag = flags.find(argv[i]);
    const char* end = argv[i + 1] + std::strlen(argv[i + 1]);
    if (flag == flags.end() || std::from_chars(argv[i + 1], end, flag->second).ptr != end) return false;
  }
  return flags["--prompt"] >= 1 && flags["--depth"] >= 0 && flags["--decode"] >= 0 && flags["--repeat"] >= 1;
}

int run(const std::string& path, std::map<std::string, double>& flags) {
  const auto prompt = static_cast<int>(flags["--prompt"]);
  const auto depth = static_cast<int>(flags["--depth"]);
  const auto decode = static_cast<int>(flags["--decode"]);

  auto start = Clock::now();
  const auto model = load(path);
  const double load_seconds = seconds_since(start);

  std::mt19937 random(0);
  std::uniform_int_distribution<TokenId> id(100, std::min(40000, model.model->info().vocab_size) - 1);
  Tokens tokens(static_cast<std::size_t>(depth + prompt));
  for (auto& token : tokens) token = id(random);
  const std::span<const TokenId> all = tokens;

  RecordedCache filled{model.model->make_cache(), {}};
  if (depth > 0) generate(model, all.first(static_cast<std::size_t>(depth)), filled, {.max_tokens = 0});

  std::vector<double> prefill_tps;
  std::vector<double> decode_tps;
  for (int i = 0; i < static_cast<int>(flags["--repeat"]); ++i) {
    auto cache = filled.fork();
    const GenerateOptions options{.max_tokens = decode + 1,
                                  .sampling = {.temperature = static_cast<float>(flags["--temp"]),
                                               .top_p = static_cast<float>(flags["--top-p"]),
                                               .seed = 0},
                                  .ignore_eos = true};
    const auto stats = generate(model, all.subspan(static_cast<std::size_t>(depth)), cache, options).stats;
    prefill_tps.push_back(stats.prefill_tps());
    decode_tps.push_back(stats.decode_tps());
  }
  const bool gpu = mlx::core::default_device() == mlx::core::Device::gpu;
  std::printf(
      "{\"engine\": \"reprise\", \"device\": \"%s\", \"prompt\": %d, \"depth\": %d, \"decode\": %d, \"load_s\": %.3f, "
      "\"prefill_tps\": %.1f, \"decode_tps\": %.1f}\n",
      gpu ? "gpu" : "cpu", prompt, depth, decode, load_seconds, median(prefill_tps), median(decode_tps));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, double> flags = {{"--prompt", 64}, {"--depth", 0}, {"--decode", 16},
                                         {"--repeat", 1},  {"--temp", 0},  {"--top-p", 1}};
  if (!read_flags(argc, argv, flags)) {
    std::fprintf(
        stderr,
        "usage: reprise_bench MODEL [--prompt N] [--depth N] [--decode N] [--repeat N] [--temp T] [--top-p P]\n");
    return 2;
  }
  try {
    return run(argv[1], flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "reprise_bench: %s\n", error.what());
    return 1;
  }
}
