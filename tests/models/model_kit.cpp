#include "tests/models/model_kit.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

#include "mlx/mlx.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"
#include "tests/models/cache_facts.h"

namespace reprise::test {

namespace mx = mlx::core;
namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

std::vector<KitCache> caches_of(const Json& list) {
  std::vector<KitCache> caches;
  for (const Json& item : list) {
    caches.push_back({item.at("class"), item.value("offset", 0), item.value("nbytes", std::size_t{0})});
  }
  return caches;
}

std::vector<KitCache> caches_of(const PromptCache& cache) {
  std::vector<KitCache> caches;
  for (std::size_t i = 0; i < cache.size(); ++i) {
    caches.push_back({cache[i].class_name(), cache[i].position().value_or(0), cache[i].nbytes()});
  }
  return caches;
}

KVQuantization quantization_of(const Json& json) { return {json.at("group_size"), json.at("bits")}; }

// Null for the model's own caches.
std::function<std::unique_ptr<LayerCache>()> layer_maker(const Json& json) {
  if (json == "default") return {};
  if (json.at("class") == "QuantizedKVCache") {
    return [quantization = quantization_of(json)] {
      return std::make_unique<QuantizedKVCache>(quantization.group_size, quantization.bits);
    };
  }
  return [size = json.at("max_size").get<int>(), keep = json.at("keep").get<int>()] {
    return std::make_unique<RotatingKVCache>(size, keep);
  };
}

KitRun run_of(const Json& json) {
  KitRun run;
  run.id = json.at("id");
  json.at("chunks").get_to(run.chunks);
  run.logits = json.at("logits");
  run.decode = json.at("decode");
  run.first_row = json.at("logit_rows").at(0);
  run.last_row = json.at("logit_rows").at(1);
  json.at("tokens").get_to(run.tokens);
  run.tolerance = json.at("tol");
  if (json.contains("convert_after_prefill")) run.convert = quantization_of(json.at("convert_after_prefill"));
  run.after_prefill = caches_of(json.at("cache_after_prefill"));
  run.after_decode = caches_of(json.at("cache_after_decode"));
  run.facts_after_prefill = json.at("cache_after_prefill");
  run.facts_after_decode = json.at("cache_after_decode");
  return run;
}

KitBatch batch_of(const Json& json) {
  KitBatch batch;
  batch.id = json.at("id");
  json.at("rows").get_to(batch.rows);
  json.at("tokens").get_to(batch.tokens);
  batch.last_logits = json.at("last_logits");
  batch.decode = json.at("decode");
  batch.tolerance = json.at("tol");
  if (batch.rows.size() < 3 || batch.tokens.size() != batch.rows.size()) {
    throw std::runtime_error(batch.id + " must have three rows or more, and tokens for each");
  }
  for (std::size_t row = 0; row < batch.rows.size(); ++row) {
    if (batch.rows[row].empty() || batch.tokens[row].size() < 4 || batch.tokens[row].size() != batch.tokens[0].size()) {
      throw std::runtime_error(batch.id + " has a row without a prompt, or with too few tokens");
    }
  }
  return batch;
}

void check(const KitScenario& scenario) {
  if (scenario.prompt.empty() || scenario.runs.empty()) throw std::runtime_error(scenario.id + " has nothing to run");
  const int length = static_cast<int>(scenario.prompt.size());
  for (const KitRun& run : scenario.runs) {
    const bool positive = std::all_of(run.chunks.begin(), run.chunks.end(), [](int n) { return n > 0; });
    if (!positive || std::accumulate(run.chunks.begin(), run.chunks.end(), 0) != length) {
      throw std::runtime_error(scenario.id + "/" + run.id + ": the chunks are not the prompt");
    }
    if (run.first_row < 0 || run.last_row > length || run.first_row >= run.last_row || run.tokens.size() < 2) {
      throw std::runtime_error(scenario.id + "/" + run.id + ": logit_rows or tokens do not fit the prompt");
    }
  }
}

}  // namespace

fs::path kit_folder() {
  if (const char* data = std::getenv("REPRISE_TEST_DATA")) return fs::path(data) / "models";
  const fs::path shared = fs::path(REPRISE_SOURCE_DIR) / ".." / "shared" / "models";
  return fs::exists(shared) ? shared : fs::path(REPRISE_SOURCE_DIR) / "tests" / "data" / "models";
}

KitModel read_kit(const fs::path& folder) {
  const Json json = Json::parse(read_file(folder / "expected.json"));
  KitModel kit{folder, json.at("dtype"), {}, read_safetensors(folder / "expected.safetensors").tensors};
  if (const Json debug = json.value("debug", Json::object()); debug.is_object()) {
    if (debug.contains("layer_outputs") && debug["layer_outputs"].is_string())
      kit.layer_outputs = debug["layer_outputs"];
    if (debug.contains("states")) debug["states"].get_to(kit.states);
  }
  for (const Json& item : json.at("scenarios")) {
    if (item.value("kind", "") == "batch") kit.batches.push_back(batch_of(item));
    if (!item.contains("runs")) continue;
    KitScenario scenario;
    scenario.make_layer = layer_maker(item.at("cache"));
    scenario.id = item.at("id");
    scenario.has_quantised_caches =
        item.contains("convert_after_prefill") ||
        (item.at("cache").is_object() && item.at("cache").at("class") == "QuantizedKVCache");
    item.at("prompt").get_to(scenario.prompt);
    scenario.f32_logits = item.value("f32_logits", "");
    scenario.f32_decode = item.value("f32_decode", "");
    for (const Json& run : item.at("runs")) {
      scenario.runs.push_back(run_of(run));
      if (item.contains("convert_after_prefill")) {
        scenario.runs.back().convert = quantization_of(item.at("convert_after_prefill"));
      }
    }
    check(scenario);
    kit.scenarios.push_back(scenario);
  }
  return kit;
}

const mx::array& KitModel::array(const std::string& name) const {
  const auto found = arrays.find(name);
  if (found == arrays.end()) throw std::runtime_error("expected.safetensors has no array \"" + name + "\"");
  return found->second;
}

mx::array feed(const LanguageModel& model, const std::vector<std::vector<int>>& rows, PromptCache& cache) {
  std::vector<int> ids;
  for (const auto& row : rows) ids.insert(ids.end(), row.begin(), row.end());
  const mx::Shape shape{static_cast<int>(rows.size()), static_cast<int>(rows.at(0).size())};
  mx::array logits = model.forward(mx::array(ids.data(), shape, mx::int32), cache);
  mx::eval(logits);
  return logits;
}

double relative_error(const mx::array& got, const mx::array& want) {
  const auto a = mx::astype(got, mx::float32);
  const auto b = mx::astype(want, mx::float32);
  return static_cast<double>(mx::max(mx::abs(mx::subtract(a, b))).item<float>()) /
         static_cast<double>(mx::max(mx::abs(b)).item<float>());
}

KitResult run_kit(const LanguageModel& model, const KitScenario& scenario, const KitRun& run) {
  PromptCache cache = model.make_cache();
  for (std::size_t i = 0; scenario.make_layer && i < cache.size(); ++i) cache.replace(i, scenario.make_layer());
  const auto step = [&](const int* ids, int n) {
    const mx::array logits = feed(model, {std::vector<int>(ids, ids + n)}, cache);
    return mx::reshape(logits, {n, logits.shape(-1)});
  };
  std::vector<mx::array> parts;
  int at = 0;
  for (int n : run.chunks) {
    parts.push_back(step(scenario.prompt.data() + at, n));
    at += n;
  }
  if (run.convert) maybe_quantize_kv_cache(cache, 0, run.convert->group_size, run.convert->bits);
  const auto all = mx::concatenate(parts, 0);
  KitResult result{mx::slice(all, {run.first_row, 0}, {run.last_row, all.shape(1)}), all, caches_of(cache), {}};
  result.facts_after_prefill = facts_of(cache);
  std::vector<mx::array> rows;
  for (std::size_t i = 0; i + 1 < run.tokens.size(); ++i) rows.push_back(step(&run.tokens[i], 1));
  result.decode = mx::concatenate(rows, 0);
  result.after_decode = caches_of(cache);
  result.facts_after_decode = facts_of(cache);
  result.cache = std::move(cache);
  return result;
}

}  // namespace reprise::test
