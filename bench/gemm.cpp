// The arithmetic rate of prefill's linear layers, beside that of OpenBLAS on the same shapes and threads.
// usage: gemm [--rows 256] [--layers 8] [--repeat 5] [--threads 2] [--bits 4] [--group-size 32]
// Ours: the linear operations of `layers` transformer blocks of SmolLM2-135M over `rows` tokens, with the norms, the
// SwiGLU and the residual sums that are part of them; 2 operations a weight and token are counted, the median of the
// repetitions counts. OpenBLAS: float32 products of the same matrices, unpacked beforehand; the best of shapes and row
// numbers counts, of the median of the repetitions each.
#include <cblas.h>

#include <cstdio>
#include <map>
#include <thread>

#include "bench/flags.h"
#include "bench/timing.h"
#include "bench/weights.h"
#include "mlx/transforms.h"
#include "reprise/base/thread_pool.h"

namespace {

namespace mx = mlx::core;
using namespace reprise;
using namespace reprise::bench;

double our_rate(const std::vector<Block>& blocks, int rows, int repeat) {
  const Shapes& shapes = kSmolLM2;
  const auto x = random_rows(rows, shapes.hidden);
  const auto attended = random_rows(rows, shapes.heads * shapes.head_dim);
  const auto run = [&] {
    for (const Block& block : blocks) {
      auto results = kernels::linear(x, block.qkv, block.norm);
      const auto h = kernels::linear_add(attended, block.o, x);
      results.push_back(
          kernels::gated_mlp(h, block.gate, block.up, block.down, kernels::GateActivation::silu, block.norm, h));
      mx::eval(results);
    }
  };
  run();
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) seconds.push_back(seconds_of(run));
  return 2.0 * block_size(shapes) * rows * static_cast<double>(blocks.size()) / median(std::move(seconds));
}

// The other engine's threads, and ours, spin for a while after their work.
void let_threads_rest() { std::this_thread::sleep_for(std::chrono::milliseconds(300)); }

double openblas_rate(int rows, int out, int in, int repeat) {
  const auto size = [](int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); };
  const std::vector<float> x(size(rows, in), 0.5f);
  const std::vector<float> weight(size(out, in), 0.25f);
  std::vector<float> result(size(rows, out));
  const auto run = [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1.0f, x.data(), in, weight.data(), in, 0.0f,
                result.data(), out);
  };
  run();
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) seconds.push_back(seconds_of(run));
  return 2.0 * rows * out * in / median(std::move(seconds));
}

int run(const Flags& flags) {
  const int threads = flags.number("threads");
  const int repeat = flags.number("repeat");
  ThreadPool::set_process_threads(threads);
  std::vector<Block> blocks;
  for (int i = 0; i < flags.number("layers"); ++i) {
    blocks.push_back(random_block(kSmolLM2, flags.number("bits"), flags.number("group-size")));
  }
  const double ours = our_rate(blocks, flags.number("rows"), repeat);
  let_threads_rest();
  openblas_set_num_threads(threads);
  double best = 0.0;
  for (const int rows : {64, 128, 256, 512}) {
    for (const auto& [out, in] : {std::pair(576, 576), {192, 576}, {1536, 576}, {576, 1536}}) {
      best = std::max(best, openblas_rate(rows, out, in, 4 * repeat));
    }
  }
  std::printf("{\"threads\": %d, \"rows\": %d, \"reprise_gflops\": %.1f, \"openblas_gflops\": %.1f, \"share\": %.3f}\n",
              threads, flags.number("rows"), ours / 1e9, best / 1e9, ours / best);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags(
      {{"rows", "256"}, {"layers", "8"}, {"repeat", "5"}, {"threads", "2"}, {"bits", "4"}, {"group-size", "32"}});
  if (!flags.read(argc, argv)) return 2;
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemm: %s\n", error.what());
    return 1;
  }
}
