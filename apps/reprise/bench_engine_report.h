// What `reprise bench engine` prints. Threads: free functions over plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/reprise/bench_replay.h"

namespace reprise::app {

struct EngineBenchReport {
  std::string model;  // its path
  ModelInfo info;
  std::string device;  // "cpu", "gpu"
  std::string target;  // instruction set of the CPU kernels
  int threads = 0;     // of the CPU kernels
  double load_seconds = 0.0;
  std::string trace;
  std::size_t conversations = 0;  // of the trace
  std::uint64_t seed = 0;
  int at_a_time = 1;
  bool cache = true;
  std::size_t peak_memory = 0;  // bytes, of the whole process
  ReplayFigures figures;
  EngineStats engine;
  bool each_request = false;  // JSON: every request as well
};

// The smallest value that at least `percent` % of them do not exceed. 0 for none.
double percentile(std::vector<double> values, double percent);

// Sums over the requests that did not fail.
struct EngineBenchTotals {
  std::int64_t failed = 0, prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0, set_aside = 0;
  std::vector<double> first_token = {};  // seconds
  std::vector<double> gaps = {};         // seconds

  double hit_rate() const;  // of the prompts' tokens
};
EngineBenchTotals totals_of(const ReplayFigures& figures);

std::string engine_bench_text(const EngineBenchReport& report);
// One line.
std::string engine_bench_json(const EngineBenchReport& report);

}  // namespace reprise::app
