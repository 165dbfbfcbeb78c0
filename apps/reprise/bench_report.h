// What `reprise bench` prints. Threads: free functions over plain values.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "apps/reprise/bench_run.h"

namespace reprise::app {

struct BenchReport {
  std::string model;  // its path
  ModelInfo info;
  std::string device;  // "cpu", "gpu"
  std::string target;  // instruction set of the CPU kernels
  int threads = 0;     // of the CPU kernels
  int prompt = 0;
  int depth = 0;
  int decode = 0;
  int batch = 1;
  double load_seconds = 0.0;
  std::size_t peak_memory = 0;  // bytes, of the whole process
  std::vector<BenchRepetition> repetitions;
  std::optional<BenchProfiles> profiles;
};

// Bytes of weights that decode reads a second: all of them in every step.
double weights_rate(const BenchReport& report);

std::string bench_text(const BenchReport& report);
// One line.
std::string bench_json(const BenchReport& report);

// The largest amount of memory that this process has had. 0 where the system does not say.
std::size_t peak_memory();

}  // namespace reprise::app
