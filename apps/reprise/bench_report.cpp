#include "apps/reprise/bench_report.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/reprise/inspect_report.h"

namespace reprise::app {
namespace {

using Json = nlohmann::json;

constexpr const char* kRest = "other (graph, MLX, host)";

template <typename... Values>
std::string line(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return std::string(text) + "\n";
}

std::string count_text(int count, int batch) {
  return (batch == 1 ? "" : std::to_string(batch) + " x ") + std::to_string(count);
}

// What no scope has seen. Operations of several threads may add up to more than the wall time.
double rest_seconds(const BenchProfile& profile) {
  double rest = profile.phase.seconds;
  for (const auto& entry : profile.operations) rest -= entry.seconds;
  return std::max(rest, 0.0);
}

std::string profile_text(const std::string& name, const BenchProfile& profile) {
  const double seconds = profile.phase.seconds;
  const int tokens = profile.phase.tokens;
  std::string text = "\n" + line("%s: %d tokens in %.1f ms, %.1f us a token", name.c_str(), tokens, seconds * 1e3,
                                 seconds * 1e6 / tokens);
  text += line("  %-26s %9s %11s %12s %8s", "operation", "calls", "ms", "us a token", "share");
  const auto row = [&](const std::string& operation, const std::string& calls, double spent) {
    text += line("  %-26s %9s %11.2f %12.2f %6.1f %%", operation.c_str(), calls.c_str(), spent * 1e3,
                 spent * 1e6 / tokens, spent / seconds * 100);
  };
  for (const auto& entry : profile.operations) row(entry.operation, std::to_string(entry.calls), entry.seconds);
  row(kRest, "", rest_seconds(profile));
  return text;
}

Json profile_json(const BenchProfile& profile) {
  Json operations = Json::array();
  for (const auto& entry : profile.operations) {
    operations.push_back({{"operation", entry.operation}, {"calls", entry.calls}, {"seconds", entry.seconds}});
  }
  return {{"tokens", profile.phase.tokens},
          {"seconds", profile.phase.seconds},
          {"operations", operations},
          {"other_seconds", rest_seconds(profile)}};
}

double rounded(double value, int per_unit) { return std::round(value * per_unit) / per_unit; }

}  // namespace

double weights_rate(const BenchReport& report) {
  const double steps = median_tps(report.repetitions, &BenchRepetition::decode) / report.batch;
  return steps * static_cast<double>(report.info.weights_nbytes);
}

std::string bench_text(const BenchReport& report) {
  const double prefill = median_seconds(report.repetitions, &BenchRepetition::prefill);
  const double decode = median_seconds(report.repetitions, &BenchRepetition::decode);
  std::string text = "model        " + report.model + "\n";
  text += "             " + report.info.model_type + ", " + format_count(report.info.num_parameters) + " parameters, " +
          report.info.quantization + ", " + format_bytes(report.info.weights_nbytes) + "\n";
  text += "machine      " + report.device;
  if (report.device == "cpu") text += ", " + report.target + line(", threads: %d", report.threads);
  text += line("loaded in    %.3f s", report.load_seconds);
  text += "cached       " + count_text(report.depth, report.batch) + " tokens\n";
  text += line("prefill      %s tokens, %.1f tokens/s, first token after %.1f ms",
               count_text(report.prompt, report.batch).c_str(),
               median_tps(report.repetitions, &BenchRepetition::prefill), prefill * 1e3);
  if (report.decode > 0) {
    text +=
        line("decode       %s tokens, %.1f tokens/s, %.3f ms a step, weights read at %.1f GB/s",
             count_text(report.decode, report.batch).c_str(), median_tps(report.repetitions, &BenchRepetition::decode),
             decode * 1e3 / report.decode, weights_rate(report) / 1e9);
  }
  if (report.peak_memory > 0) text += "peak memory  " + format_bytes(report.peak_memory) + "\n";
  if (report.profiles) {
    text += profile_text("prefill", report.profiles->prefill);
    if (report.decode > 0) text += profile_text("decode", report.profiles->decode);
  }
  return text;
}

std::string bench_json(const BenchReport& report) {
  Json json = {{"engine", "reprise"},
               {"model", report.model},
               {"device", report.device},
               {"target", report.target},
               {"threads", report.threads},
               {"prompt", report.prompt},
               {"depth", report.depth},
               {"decode", report.decode},
               {"batch", report.batch},
               {"repeat", report.repetitions.size()},
               {"load_s", rounded(report.load_seconds, 10000)},
               {"ttft_ms", rounded(median_seconds(report.repetitions, &BenchRepetition::prefill) * 1e3, 1000)},
               {"prefill_tps", rounded(median_tps(report.repetitions, &BenchRepetition::prefill), 100)},
               {"decode_tps", rounded(median_tps(report.repetitions, &BenchRepetition::decode), 100)},
               {"parameters", report.info.num_parameters},
               {"weights_nbytes", report.info.weights_nbytes},
               {"weights_bytes_per_s", std::round(weights_rate(report))},
               {"peak_memory", report.peak_memory}};
  if (report.profiles) {
    json["profile"] = {{"prefill", profile_json(report.profiles->prefill)}};
    if (report.decode > 0) json["profile"]["decode"] = profile_json(report.profiles->decode);
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::size_t peak_memory() {
  rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0 || usage.ru_maxrss < 0) return 0;
#ifdef __APPLE__
  constexpr std::size_t kUnit = 1;
#else
  constexpr std::size_t kUnit = 1024;
#endif
  return static_cast<std::size_t>(usage.ru_maxrss) * kUnit;
}

}  // namespace reprise::app
