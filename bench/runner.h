// Measures kernels alone and prints a line for each.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/timing.h"
#include "bench/weights.h"
#include "mlx/array.h"
#include "mlx/transforms.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu_target.h"

namespace reprise::bench {

struct Case {
  std::string name;
  double bytes = 0.0;                                               // of one operation
  double operations = 0.0;                                          // of one
  std::vector<std::function<std::vector<mlx::core::array>()>> run;  // each over data of its own
};

struct Result {
  std::string name;
  double seconds = 0.0;  // of one operation
  double kernel_seconds = 0.0;
  double gb_per_s = 0.0;
  double gops = 0.0;
};

class Runner {
 public:
  // Of the cases whose line contains `only`, each for `least_seconds` at least.
  Runner(std::string only, double least_seconds) : only_(std::move(only)), least_seconds_(least_seconds) {
    std::printf("instruction set: %s, threads: %d\n", kernels::cpu_target().c_str(), ThreadPool::process().threads());
    std::printf("%-44s %11s %11s %9s %9s\n", "kernel", "us", "kernel us", "GB/s", "GOPS");
  }

  bool wants(const std::string& name) const { return name.find(only_) != std::string::npos; }

  void measure(const Case& one) { measure(std::vector{one}); }

  // Cases that are compared take turns, so that what else the machine does falls on all of them.
  void measure(const std::vector<Case>& cases) {
    std::vector<std::vector<double>> seconds(cases.size());
    std::vector<double> in_kernels(cases.size());
    for (const auto& one : cases) run_all(one);
    const double least = least_seconds_ * static_cast<double>(cases.size());
    const auto start = Clock::now();
    while (seconds[0].size() < 3 || seconds_since(start) < least) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        Profile::reset();
        Profile::enable(true);
        seconds[i].push_back(seconds_of([&] { run_all(cases[i]); }));
        Profile::enable(false);
        for (const auto& entry : Profile::entries()) in_kernels[i] += entry.seconds;
      }
    }
    for (std::size_t i = 0; i < cases.size(); ++i) add_result(cases[i], seconds[i], in_kernels[i]);
  }

  const std::vector<Result>& results() const { return results_; }

 private:
  static void run_all(const Case& one) {
    std::vector<mlx::core::array> outputs;
    for (const auto& operation : one.run) {
      for (auto& output : operation()) outputs.push_back(std::move(output));
    }
    mlx::core::eval(outputs);
  }

  void add_result(const Case& one, const std::vector<double>& seconds, double in_kernels) {
    const auto count = static_cast<double>(one.run.size());
    Result result{one.name, median(seconds) / count, in_kernels / static_cast<double>(seconds.size()) / count};
    const double busy = result.kernel_seconds > 0.0 ? result.kernel_seconds : result.seconds;
    result.gb_per_s = one.bytes / busy / 1e9;
    result.gops = one.operations / busy / 1e9;
    std::printf("%-44s %11.1f %11.1f %9.1f %9.1f\n", result.name.c_str(), result.seconds * 1e6,
                result.kernel_seconds * 1e6, result.gb_per_s, result.gops);
    std::fflush(stdout);
    results_.push_back(std::move(result));
  }

  std::string only_;
  double least_seconds_;
  std::vector<Result> results_;
};

// Enough copies that together they do not fit the caches.
inline std::size_t copies(double bytes) { return static_cast<std::size_t>(std::clamp(96e6 / bytes, 1.0, 48.0)); }

inline std::string name_of(const char* kernel, const Shapes& shapes, const std::string& more) {
  return std::string(shapes.name) + " " + kernel + ", " + more;
}

inline std::string rows_text(int rows) { return std::to_string(rows) + (rows == 1 ? " row" : " rows"); }

}  // namespace reprise::bench
