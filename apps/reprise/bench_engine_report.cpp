#include "apps/reprise/bench_engine_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/reprise/inspect_report.h"

namespace reprise::app {
namespace {

using Json = nlohmann::json;

template <typename... Values>
std::string line(const char* format, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return std::string(text) + "\n";
}

double rounded(double value, int per_unit) { return std::round(value * per_unit) / per_unit; }
double milliseconds(double seconds) { return rounded(seconds * 1e3, 1000); }

double rate(std::int64_t tokens, double seconds) { return seconds > 0.0 ? static_cast<double>(tokens) / seconds : 0.0; }

Json percentiles(const std::vector<double>& seconds) {
  return {{"p50", milliseconds(percentile(seconds, 50))},
          {"p90", milliseconds(percentile(seconds, 90))},
          {"p99", milliseconds(percentile(seconds, 99))}};
}

Json disk_json(const DiskTierStats& disk) {
  return {{"blocks", disk.blocks},
          {"checkpoints", disk.checkpoints},
          {"nbytes", disk.nbytes},
          {"hits", disk.hits},
          {"misses", disk.misses},
          {"writes", disk.writes},
          {"evictions", disk.evictions},
          {"damaged", disk.damaged},
          {"failed_writes", disk.failed_writes},
          {"dropped_writes", disk.dropped_writes},
          {"last_error", disk.last_error}};
}

Json request_json(const RequestFigures& request) {
  Json json = {{"conversation", request.conversation},         {"turn", request.turn},
               {"begun_ms", milliseconds(request.begun)},      {"prompt_tokens", request.stats.prompt_tokens},
               {"cached_tokens", request.stats.cached_tokens}, {"completion_tokens", request.stats.completion_tokens},
               {"set_aside", request.stats.times_set_aside},   {"ttft_ms", milliseconds(request.first_token)},
               {"total_ms", milliseconds(request.ended)}};
  if (!request.error.empty()) json["error"] = request.error;
  return json;
}

}  // namespace

double percentile(std::vector<double> values, double percent) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const double rank = std::clamp(std::ceil(percent / 100.0 * count), 1.0, count);
  return values[static_cast<std::size_t>(rank) - 1];
}

double EngineBenchTotals::hit_rate() const {
  return prompt_tokens == 0 ? 0.0 : static_cast<double>(cached_tokens) / static_cast<double>(prompt_tokens);
}

EngineBenchTotals totals_of(const ReplayFigures& figures) {
  EngineBenchTotals totals;
  for (const auto& request : figures.requests) {
    if (!request.error.empty()) {
      ++totals.failed;
      continue;
    }
    totals.prompt_tokens += request.stats.prompt_tokens;
    totals.cached_tokens += request.stats.cached_tokens;
    totals.completion_tokens += request.stats.completion_tokens;
    totals.set_aside += request.stats.times_set_aside;
    totals.first_token.push_back(request.first_token);
    totals.gaps.insert(totals.gaps.end(), request.gaps.begin(), request.gaps.end());
  }
  return totals;
}

std::string engine_bench_text(const EngineBenchReport& report) {
  const auto totals = totals_of(report.figures);
  const auto& engine = report.engine;
  const double seconds = report.figures.seconds;
  std::string text = "model        " + report.model + "\n";
  text += "machine      " + report.device;
  if (report.device == "cpu") text += ", " + report.target + ", threads: " + std::to_string(report.threads);
  text += line("\ntrace        %s, %zu conversations, %d at a time%s", report.trace.c_str(), report.conversations,
               report.at_a_time, report.cache ? "" : ", nothing kept");
  text += line("requests     %zu in %.3f s, %lld failed", report.figures.requests.size(), seconds,
               static_cast<long long>(totals.failed));
  text +=
      line("prompts      %lld tokens, %.1f tokens/s, %.1f %% of them from the cache",
           static_cast<long long>(totals.prompt_tokens), rate(totals.prompt_tokens, seconds), totals.hit_rate() * 100);
  text += line("answers      %lld tokens, %.1f tokens/s", static_cast<long long>(totals.completion_tokens),
               rate(totals.completion_tokens, seconds));
  const auto part = [](const std::vector<double>& values, double percent) { return percentile(values, percent) * 1e3; };
  text += line("first token  after %.1f ms (half), %.1f ms (90 %%), %.1f ms (99 %%)", part(totals.first_token, 50),
               part(totals.first_token, 90), part(totals.first_token, 99));
  text += line("next tokens  after %.2f ms (half), %.2f ms (90 %%), %.2f ms (99 %%)", part(totals.gaps, 50),
               part(totals.gaps, 90), part(totals.gaps, 99));
  text += "cache        " + format_bytes(engine.nbytes) + ", at most " +
          format_bytes(engine.scheduler.max_nbytes_seen) + " of " + format_bytes(engine.max_bytes);
  text += line("; evicted %llu blocks, %llu checkpoints; %lld times a request was set aside",
               static_cast<unsigned long long>(engine.prefix.tree.evicted_blocks),
               static_cast<unsigned long long>(engine.prefix.tree.evicted_checkpoints),
               static_cast<long long>(totals.set_aside));
  if (engine.prefix.disk) {
    const auto& disk = *engine.prefix.disk;
    text += "disk         " + format_bytes(disk.nbytes) +
            line(", %llu hits, %llu writes", static_cast<unsigned long long>(disk.hits),
                 static_cast<unsigned long long>(disk.writes));
  }
  if (engine.reuse_checks > 0) {
    text += line("checked      %llu answers over stored prefixes, %llu wrong",
                 static_cast<unsigned long long>(engine.reuse_checks),
                 static_cast<unsigned long long>(engine.reuse_mismatches));
  }
  if (report.peak_memory > 0) {
    text += "peak memory  " + format_bytes(report.peak_memory) + ", of which weights " +
            format_bytes(report.info.weights_nbytes) + "\n";
  }
  return text;
}

std::string engine_bench_json(const EngineBenchReport& report) {
  const auto totals = totals_of(report.figures);
  const auto& engine = report.engine;
  const double seconds = report.figures.seconds;
  Json json = {{"engine", "reprise"},
               {"model", report.model},
               {"device", report.device},
               {"target", report.target},
               {"threads", report.threads},
               {"load_s", rounded(report.load_seconds, 10000)},
               {"trace", report.trace},
               {"conversations", report.conversations},
               {"seed", report.seed},
               {"at_a_time", report.at_a_time},
               {"cache", report.cache},
               {"requests", report.figures.requests.size()},
               {"failed", totals.failed},
               {"wall_s", rounded(seconds, 10000)},
               {"prompt_tokens", totals.prompt_tokens},
               {"cached_tokens", totals.cached_tokens},
               {"prefilled_tokens", engine.scheduler.prefilled_tokens},
               {"completion_tokens", totals.completion_tokens},
               {"hit_rate", rounded(totals.hit_rate(), 10000)},
               {"prompt_tps", rounded(rate(totals.prompt_tokens, seconds), 100)},
               {"completion_tps", rounded(rate(totals.completion_tokens, seconds), 100)},
               {"ttft_ms", percentiles(totals.first_token)},
               {"inter_token_ms", percentiles(totals.gaps)},
               {"nbytes", engine.nbytes},
               {"peak_nbytes", engine.scheduler.max_nbytes_seen},
               {"max_bytes", engine.max_bytes},
               {"over_budget", engine.scheduler.over_budget},
               {"evicted_blocks", engine.prefix.tree.evicted_blocks},
               {"evicted_checkpoints", engine.prefix.tree.evicted_checkpoints},
               {"set_aside", totals.set_aside},
               {"refused_entries", engine.prefix.refused},
               {"disk_hit_tokens", engine.prefix.disk_hit_tokens},
               {"reuse_checks", engine.reuse_checks},
               {"reuse_mismatches", engine.reuse_mismatches},
               {"weights_nbytes", report.info.weights_nbytes},
               {"peak_memory", report.peak_memory}};
  if (engine.prefix.disk) json["disk"] = disk_json(*engine.prefix.disk);
  if (report.each_request) {
    json["each"] = Json::array();
    for (const auto& request : report.figures.requests) json["each"].push_back(request_json(request));
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace reprise::app
