// What a fork of a prompt cache costs, by its length: time and new bytes, which must not grow with the tokens. usage:
// fork [--layers 30] [--repeat 200] [--json FILE]
// Each cache has 3 key/value heads of 64 in float32 a layer (SmolLM2-135M). New bytes are those of MLX's allocator; the
// last column is what the first token written to a fork costs while both live: the copy of the buffers, which is what
// the fork saved until then.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "mlx/memory.h"
#include "mlx/ops.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache.h"

namespace {

namespace mx = mlx::core;
using namespace reprise;
using Clock = std::chrono::steady_clock;

struct Flags {
  int layers = 30;
  int repeat = 200;
  std::string json;
};

struct Row {
  int tokens;
  std::size_t cache_bytes;
  double fork_us;  // median
  std::size_t fork_bytes;
  double first_write_ms;
};

std::size_t active_bytes() {
  mx::synchronize();
  return mx::get_active_memory();
}

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void append(PromptCache& cache, int tokens) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    const mx::array rows = mx::ones({1, 3, tokens, 64});
    cache.at<KVCache>(layer).update_and_fetch(rows, rows);
  }
  cache.eval();
}

Row measure(const Flags& flags, int tokens) {
  PromptCache cache = make_kv_prompt_cache(flags.layers);
  append(cache, tokens);
  Row row{tokens, prompt_cache_nbytes(cache), 0, 0, 0};

  std::vector<double> times;
  std::vector<PromptCache> forks;
  forks.reserve(static_cast<std::size_t>(flags.repeat));
  const std::size_t before = active_bytes();
  for (int i = 0; i < flags.repeat; ++i) {
    const auto start = Clock::now();
    forks.push_back(cache.fork());
    times.push_back(microseconds_since(start));
  }
  for (const PromptCache& fork : forks) fork.eval();
  row.fork_bytes = (active_bytes() - before) / static_cast<std::size_t>(flags.repeat);
  std::nth_element(times.begin(), times.begin() + flags.repeat / 2, times.end());
  row.fork_us = times[static_cast<std::size_t>(flags.repeat / 2)];

  const auto start = Clock::now();
  append(forks.front(), 1);
  row.first_write_ms = microseconds_since(start) / 1000;
  return row;
}

bool write_json(const Flags& flags, const std::vector<Row>& rows) {
  std::FILE* file = std::fopen(flags.json.c_str(), "w");
  if (!file) return false;
  std::fprintf(file, "{\"layers\": %d, \"repeat\": %d, \"rows\": [", flags.layers, flags.repeat);
  for (const Row& row : rows) {
    std::fprintf(file,
                 "%s\n  {\"tokens\": %d, \"cache_bytes\": %zu, \"fork_us\": %.2f, \"fork_bytes\": %zu, "
                 "\"first_write_ms\": %.3f}",
                 &row == &rows.front() ? "" : ",", row.tokens, row.cache_bytes, row.fork_us, row.fork_bytes,
                 row.first_write_ms);
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0;
}

bool read_count(const char* text, int& count) {
  const char* end = text + std::strlen(text);
  return std::from_chars(text, end, count).ptr == end && count >= 1;
}

std::optional<Flags> read_flags(int argc, char** argv) {
  Flags flags;
  if (argc % 2 != 1) return std::nullopt;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      flags.json = argv[i + 1];
    } else if (!(flag == "--layers" && read_count(argv[i + 1], flags.layers)) &&
               !(flag == "--repeat" && read_count(argv[i + 1], flags.repeat))) {
      return std::nullopt;
    }
  }
  return flags;
}

int run(const Flags& flags) {
  std::vector<Row> rows;
  std::printf("%8s %12s %12s %12s %16s\n", "tokens", "cache MiB", "fork µs", "new bytes", "first write ms");
  for (int tokens = 256; tokens <= 32'768; tokens *= 2) {
    rows.push_back(measure(flags, tokens));
    const Row& row = rows.back();
    std::printf("%8d %12.1f %11.2f %12zu %16.3f\n", row.tokens, static_cast<double>(row.cache_bytes) / (1 << 20),
                row.fork_us, row.fork_bytes, row.first_write_ms);
  }
  if (flags.json.empty() || write_json(flags, rows)) return 0;
  std::fprintf(stderr, "fork: cannot write %s\n", flags.json.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const auto flags = read_flags(argc, argv);
  if (!flags) {
    std::fprintf(stderr, "usage: fork [--layers N] [--repeat N] [--json FILE]\n");
    return 2;
  }
  try {
    return run(*flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fork: %s\n", error.what());
    return 1;
  }
}
