// Each kernel alone, in the shapes of SmolLM2-135M and of Llama-3-8B: time, rate of memory, rate of arithmetic.
// usage: kernels [--threads 2] [--target AVX2] [--only TEXT] [--ms 150] [--bits 4] [--group-size 32] [--json FILE]
//   --target  an instruction set (AVX3_DL, AVX3, AVX2, SSE4, SSSE3, SSE2, NEON) instead of this machine's best
//   --only    kernels whose line contains TEXT
//   --ms      measures each for so long at least
// Operations follow each other over weights of their own, together larger than the caches where there is one row, as in
// a model. "us" is wall time of an operation with MLX's share of it; "kernel" is what the kernel itself took. Bytes are
// those that must be read at least; operations are two for each weight and row, or each query, key and feature twice.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/flags.h"
#include "bench/paged.h"
#include "bench/runner.h"
#include "bench/weights.h"
#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/attention.h"
#include "reprise/kernels/cpu_target.h"
#include "reprise/kernels/delta_rule.h"
#include "reprise/kernels/rg_lru.h"
#include "reprise/kernels/scan.h"
#include "reprise/kernels/select.h"
#include "reprise/kernels/short_conv.h"

namespace {

namespace mx = mlx::core;
using namespace reprise;
using namespace reprise::bench;

void measure_linear(Runner& runner, const Shapes& shapes, const Flags& flags, const std::vector<int>& row_numbers) {
  const int bits = flags.number("bits");
  const int group_size = flags.number("group-size");
  const double weight_size = bits / 8.0 + 4.0 / group_size;
  const int q = shapes.heads * shapes.head_dim;
  const double qkv_size = 1.0 * shapes.hidden * (q + 2 * shapes.kv_heads * shapes.head_dim);
  const double o_size = 1.0 * shapes.hidden * q;
  const double mlp_size = 3.0 * shapes.hidden * shapes.mlp;
  std::vector<Block> blocks;
  const auto add = [&](const char* kernel, int rows, double size, const auto& operation) {
    const auto name = name_of(kernel, shapes, rows_text(rows));
    if (!runner.wants(name)) return;
    Case one{name, size * weight_size, 2.0 * size * rows, {}};
    const std::size_t number = rows <= 8 ? copies(one.bytes) : 1;
    while (blocks.size() < number) blocks.push_back(random_block(shapes, bits, group_size));
    for (std::size_t i = 0; i < number; ++i) {
      one.run.emplace_back([&operation, &block = blocks[i]] { return operation(block); });
    }
    runner.measure(one);
  };
  for (const int rows : row_numbers) {
    const auto x = random_rows(rows, shapes.hidden);
    const auto attended = random_rows(rows, q);
    using Arrays = std::vector<mx::array>;
    add("norm+qkv", rows, qkv_size, [&](const Block& b) { return kernels::linear(x, b.qkv, b.norm); });
    add("o+residual", rows, o_size, [&](const Block& b) { return Arrays{kernels::linear_add(attended, b.o, x)}; });
    add("norm+mlp+residual", rows, mlp_size, [&](const Block& b) {
      return Arrays{kernels::gated_mlp(x, b.gate, b.up, b.down, kernels::GateActivation::silu, b.norm, x)};
    });
  }
}

void measure_head(Runner& runner, const Shapes& shapes, int bits, int group_size) {
  AffineMapPtr head;
  for (const int rows : {1, 8}) {
    const auto name = name_of("norm+head", shapes, rows_text(rows) + ", " + std::to_string(bits) + " bits");
    if (!runner.wants(name)) continue;
    if (!head) head = random_map(shapes.vocab, shapes.hidden, bits, group_size);
    const auto x = random_rows(rows, shapes.hidden);
    const kernels::RmsNormParams norm{mx::ones({shapes.hidden}), 1e-5f};
    runner.measure({name, static_cast<double>(weight_bytes(*head)), 2.0 * shapes.vocab * shapes.hidden * rows, {[&] {
                      return kernels::linear(x, {head}, norm);
                    }}});
  }
}

// Keys and values of `columns` tokens in one of the ways caches keep them.
KeysValues random_keys_values(const Shapes& shapes, int columns, const std::string& kind, double& bytes) {
  const mx::Shape shape = {1, shapes.kv_heads, columns, shapes.head_dim};
  const auto numbers = [&](mx::Dtype dtype) {
    auto x = mx::astype(mx::random::uniform(mx::array(-1.0f), mx::array(1.0f), shape, mx::float32), dtype);
    x.eval();
    bytes += static_cast<double>(x.nbytes());
    return x;
  };
  if (kind == "f16") return DenseKV{numbers(mx::float16), numbers(mx::float16)};
  if (kind == "f32") return DenseKV{numbers(mx::float32), numbers(mx::float32)};
  const KVQuantization quantization{.group_size = 64, .bits = kind == "8 bits" ? 8 : 4};
  const auto quantized = [&] {
    const auto parts = mx::quantize(numbers(mx::float16), quantization.group_size, quantization.bits);
    mx::eval(parts);
    return QuantizedTensor{parts[0], parts[1], parts[2]};
  };
  const QuantizedKV both{quantized(), quantized(), quantization};
  bytes = 0.0;
  for (const auto* tensor : {&both.keys, &both.values}) {
    bytes += static_cast<double>(tensor->packed.nbytes() + tensor->scales.nbytes() + tensor->biases.nbytes());
  }
  return both;
}

void measure_attention(Runner& runner, const Shapes& shapes) {
  struct Size {
    int rows;
    int columns;
  };
  for (const Size size : {Size{1, 512}, {1, 4096}, {64, 4096}, {256, 256}}) {
    for (const char* kind : {"f16", "f32", "8 bits", "4 bits"}) {
      const auto name =
          name_of("attention", shapes, rows_text(size.rows) + ", " + std::to_string(size.columns) + " keys, " + kind);
      if (!runner.wants(name)) continue;
      // Causal: of the last rows' own columns half are hidden.
      const double seen = size.columns - (size.rows - 1) / 2.0;
      Case one{name, 0.0, 4.0 * shapes.heads * size.rows * seen * shapes.head_dim, {}};
      auto queries = mx::random::uniform(mx::array(-1.0f), mx::array(1.0f),
                                         {1, shapes.heads, size.rows, shapes.head_dim}, mx::float32);
      queries.eval();
      const std::size_t number = size.rows == 1 ? 12 : 1;
      for (std::size_t i = 0; i < number; ++i) {
        one.bytes = 0.0;
        auto stored = random_keys_values(shapes, size.columns, kind, one.bytes);
        one.run.emplace_back(
            [=] { return std::vector{kernels::attention(queries, stored, {.scale = 0.125f, .mask = Causal{}})}; });
      }
      runner.measure(one);
    }
  }
}

void measure_sampling(Runner& runner, const Shapes& shapes) {
  auto logits = mx::multiply(mx::random::normal({1, shapes.vocab}), mx::array(3.0f));
  logits.eval();
  const auto add = [&](const char* kernel, const std::function<kernels::Selection()>& select) {
    const auto name = name_of(kernel, shapes, "1 row");
    if (!runner.wants(name)) return;
    const auto run = [&] {
      const auto chosen = select();
      return std::vector{chosen.tokens, chosen.logprobs};
    };
    runner.measure({name, 4.0 * shapes.vocab, 1.0 * shapes.vocab, {run}});
  };
  add("likeliest", [&] { return kernels::likeliest(logits); });
  if (!kernels::can_draw()) return;
  const auto draw = [&](const kernels::DrawParams& params) {
    return [&, params] { return kernels::draw(logits, params, {0.4f}); };
  };
  add("draw", draw({}));
  add("draw top-p 0.9", draw({.top_p = 0.9f}));
  add("draw min-p 0.05", draw({.min_p = 0.05f}));
  add("draw top-k 40", draw({.top_k = 40}));
}

// The recurrences of Qwen3-Next (32 heads, states of 128 by 128) and RecurrentGemma 2B. As in a model, nobody but the
// next operation holds a state.
void measure_recurrences(Runner& runner) {
  const auto add = [&](const std::string& name, double bytes, double operations, const auto& step) {
    if (!runner.wants(name)) return;
    Case one{name, bytes, operations, {}};
    for (std::size_t i = 0; i < copies(bytes); ++i) {
      one.run.emplace_back([step, state = std::make_shared<std::optional<mx::array>>()] {
        auto result = step(std::exchange(*state, std::nullopt));
        *state = result.state;
        return std::vector{result.output};
      });
    }
    runner.measure(one);
  };
  constexpr int kHeads = 32, kSize = 128, kFeatures = 2560;
  const kernels::DeltaRuleParams params{kHeads / 2, kHeads, kSize, kSize, mx::ones({kHeads}), mx::zeros({kHeads})};
  for (const int columns : {1, 256}) {
    const auto random = [&](int size) {
      auto x = mx::random::normal({1, columns, size});
      x.eval();
      return x;
    };
    const double state = 4.0 * kHeads * kSize * kSize;
    const kernels::DeltaRuleInputs delta{random(2 * kHeads * kSize), random(kHeads), random(kHeads)};
    const std::string text = std::to_string(columns) + (columns == 1 ? " column" : " columns");
    add("gated delta rule, 32 heads of 128, " + text, 2.0 * state, state / 4.0 * 8.0 * columns,
        [=](auto before) { return kernels::gated_delta_rule(delta, params, before); });
    const kernels::RgLruInputs lru{random(kFeatures), random(kFeatures), random(kFeatures), mx::ones({kFeatures})};
    add("RG-LRU, 2560 features, " + text, 16.0 * kFeatures * columns, 10.0 * kFeatures * columns,
        [=](auto before) { return kernels::rg_lru(lru, before); });
  }
}

// The scans of Mamba 130M (1,536 channels of 16 states) and of Mamba 2 130M (24 heads of 64, 128 states), and the
// convolution before them.
void measure_scans(Runner& runner) {
  constexpr int kChannels = 1536, kStates = 16, kHeads = 24, kHeadStates = 128, kTaps = 4;
  const auto rates = [](const mx::Shape& shape) {
    auto a = mx::full(shape, -0.5f);
    a.eval();
    return a;
  };
  const auto selective = std::make_shared<const kernels::SelectiveScan>(
      kernels::SelectiveScan{rates({kChannels, kStates}), rates({kChannels})});
  const auto by_heads =
      std::make_shared<const kernels::HeadScan>(kernels::HeadScan{rates({kHeads}), rates({kHeads}), 1});
  const kernels::ShortConvParams conv{rates({kChannels, kTaps}), rates({kChannels}), kernels::ConvActivation::silu};
  for (const int columns : {1, 256}) {
    const auto random = [&](int size) {
      auto x = mx::random::normal({1, columns, size});
      x.eval();
      return x;
    };
    const std::string text = std::to_string(columns) + (columns == 1 ? " column" : " columns");
    const auto add = [&](const std::string& name, double bytes, double operations, const auto& run) {
      if (!runner.wants(name + text)) return;
      runner.measure(
          {name + text, bytes, operations, std::vector<std::function<std::vector<mx::array>()>>(copies(bytes), run)});
    };
    const auto x = random(kChannels);
    const kernels::ScanInputs narrow{
        x, random(kChannels), random(kStates), random(kStates), random(kChannels), {}, rates({1, kChannels, kStates})};
    add("selective scan, 1536 channels, ", 12.0 * kChannels * kStates, 6.0 * kChannels * kStates * columns, [=] {
      const auto result = kernels::selective_scan(narrow, selective);
      return std::vector{result.y, result.state};
    });
    const kernels::ScanInputs wide{x,
                                   random(kHeads),
                                   random(kHeadStates),
                                   random(kHeadStates),
                                   random(kChannels),
                                   {},
                                   rates({1, kHeads, kChannels / kHeads, kHeadStates})};
    add("scan of 24 heads of 64, ", 8.0 * kChannels * kHeadStates, 5.0 * kChannels * kHeadStates * columns, [=] {
      const auto result = kernels::head_scan(wide, by_heads);
      return std::vector{result.y, result.state};
    });
    const kernels::ShortConvInputs convolved{x, rates({1, kTaps - 1, kChannels})};
    add("short convolution, 1536 channels, ", 4.0 * kChannels * (kTaps + columns), 2.0 * kChannels * kTaps * columns,
        [=] {
          const auto result = kernels::short_conv(convolved, conv);
          return std::vector{result.output, result.state};
        });
  }
}

// Must come before the kernels choose for themselves.
void force_target(const std::string& name) {
  ::setenv("REPRISE_CPU_TARGET", name.c_str(), 1);
  if (kernels::cpu_target() == name) return;
  throw Error(ErrorCode::invalid_argument,
              "--target must be an instruction set that this machine has, but got " + name);
}

bool write_json(const std::string& file, const std::vector<Result>& results) {
  std::FILE* out = std::fopen(file.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out, "[");
  for (const auto& result : results) {
    std::fprintf(out,
                 "%s\n {\"kernel\": \"%s\", \"us\": %.2f, \"kernel_us\": %.2f, \"gb_per_s\": %.2f, \"gops\": %.2f}",
                 &result == &results.front() ? "" : ",", result.name.c_str(), result.seconds * 1e6,
                 result.kernel_seconds * 1e6, result.gb_per_s, result.gops);
  }
  std::fprintf(out, "\n]\n");
  return std::fclose(out) == 0;
}

int run(const Flags& flags) {
  if (!flags.text("target").empty()) force_target(flags.text("target"));
  ThreadPool::set_process_threads(flags.number("threads"));
  Runner runner(flags.text("only"), flags.number("ms") / 1e3);
  const int bits = flags.number("bits");
  const int group_size = flags.number("group-size");
  measure_linear(runner, kSmolLM2, flags, {1, 2, 4, 8, 64, 256});
  measure_head(runner, kSmolLM2, 8, group_size);
  measure_attention(runner, kSmolLM2);
  measure_paged_attention(runner, kSmolLM2);
  measure_sampling(runner, kSmolLM2);
  measure_linear(runner, kLlama8B, flags, {1, 2, 4, 8, 64});
  measure_head(runner, kLlama8B, bits, group_size);
  measure_attention(runner, kLlama8B);
  measure_paged_attention(runner, kLlama8B);
  measure_sampling(runner, kLlama8B);
  measure_recurrences(runner);
  measure_scans(runner);
  if (flags.text("json").empty() || write_json(flags.text("json"), runner.results())) return 0;
  throw Error(ErrorCode::internal, "cannot write " + flags.text("json"));
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags({{"threads", "2"},
               {"target", ""},
               {"only", ""},
               {"ms", "150"},
               {"bits", "4"},
               {"group-size", "32"},
               {"json", ""}});
  if (!flags.read(argc, argv)) return 2;
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernels: %s\n", error.what());
    return 1;
  }
}
