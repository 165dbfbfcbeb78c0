// The rate at which this machine's memory can be read, which bounds decode: every weight is read once a token.
// usage: stream [--threads 2] [--mib 1024] [--passes 12]
// Method: each thread has its own part of one array, far larger than any cache and first written by that thread (so
// that its pages are near); a pass sums the array as 64-bit integers, in plain C++ with 32 independent sums, all
// threads starting together; the rate is that of the fastest pass, hence the hardest to come up to.
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "bench/flags.h"
#include "bench/timing.h"

namespace {

using namespace reprise::bench;

constexpr std::size_t kSums = 32;

// The widest loads that the machine has, where the compiler can choose them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
std::uint64_t
sum(const std::uint64_t* numbers, std::size_t count) {
  std::uint64_t sums[kSums] = {};
  for (std::size_t i = 0; i + kSums <= count; i += kSums) {
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += numbers[i + j];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t part : sums) total += part;
  return total;
}

struct Free {
  void operator()(std::uint64_t* pointer) const { ::operator delete[](pointer, std::align_val_t(4096)); }
};

// Seconds of each pass.
std::vector<double> measure(std::size_t threads, std::size_t bytes, int passes) {
  const std::size_t share = bytes / sizeof(std::uint64_t) / threads;
  const std::unique_ptr<std::uint64_t[], Free> numbers(
      static_cast<std::uint64_t*>(::operator new[](share* threads * sizeof(std::uint64_t), std::align_val_t(4096))));
  std::vector<double> seconds;
  std::atomic<std::uint64_t> total = 0;  // keeps the sums from being left out
  Clock::time_point start;
  std::barrier step(static_cast<std::ptrdiff_t>(threads), [&]() noexcept {
    if (start != Clock::time_point()) seconds.push_back(seconds_since(start));
    start = Clock::now();
  });
  seconds.reserve(static_cast<std::size_t>(passes) + 1);
  std::vector<std::thread> workers;
  for (std::size_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, part = numbers.get() + share * t] {
      for (std::size_t i = 0; i < share; ++i) part[i] = i;
      for (int pass = 0; pass < passes; ++pass) {
        step.arrive_and_wait();
        total += sum(part, share);
      }
      step.arrive_and_wait();
    });
  }
  for (auto& worker : workers) worker.join();
  if (total == 1) std::printf("\n");
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags({{"threads", "2"}, {"mib", "1024"}, {"passes", "12"}});
  if (!flags.read(argc, argv)) return 2;
  const auto threads = static_cast<std::size_t>(flags.number("threads"));
  const auto bytes = static_cast<std::size_t>(flags.number("mib")) << 20;
  const auto seconds = measure(threads, bytes, flags.number("passes"));
  const auto gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf("{\"threads\": %zu, \"mib\": %d, \"gb_per_s\": %.2f, \"median_gb_per_s\": %.2f}\n", threads,
              flags.number("mib"), gigabytes / *std::min_element(seconds.begin(), seconds.end()),
              gigabytes / median(seconds));
  return 0;
}
