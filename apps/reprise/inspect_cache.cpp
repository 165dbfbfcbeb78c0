#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/reprise/inspect_report.h"
#include "apps/reprise/output.h"
#include "apps/reprise/prompt_record.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"

namespace reprise::app {
namespace {

std::string shape_text(const mlx::core::array& array) {
  std::string text;
  for (const auto n : array.shape()) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text;
}

std::string dtype_text(const mlx::core::array& array) {
  const auto dtype = array.dtype();
  if (dtype == mlx::core::float32) return "float32";
  if (dtype == mlx::core::float16) return "float16";
  if (dtype == mlx::core::bfloat16) return "bfloat16";
  if (dtype == mlx::core::uint32) return "packed";
  return "other";
}

template <typename Cache>
void add_ring(std::string& text, const LayerCache& cache) {
  const auto* ring = dynamic_cast<const Cache*>(&cache);
  if (ring == nullptr) return;
  text += ", max_size " + std::to_string(ring->max_size()) + ", keep " + std::to_string(ring->keep());
}

template <typename Cache>
void add_quantization(std::string& text, const LayerCache& cache) {
  const auto* quantized = dynamic_cast<const Cache*>(&cache);
  if (quantized == nullptr) return;
  text += ", " + std::to_string(quantized->bits()) + " bits, groups of " + std::to_string(quantized->group_size());
}

// "BatchQuantizedKVCache, 8 bits, groups of 64, 2 rows, offsets 7, 21": the class and its numbers.
std::string cache_text(const LayerCache& cache) {
  std::string text = cache.class_name();
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    return text + " of " + std::to_string(list->num_children());
  }
  if (const auto* chunked = dynamic_cast<const FrontTrimmedCache*>(&cache)) {
    text += ", chunk_size " + std::to_string(chunked->chunk_size());
  }
  if (const auto* arrays = dynamic_cast<const ArraysCache*>(&cache)) {
    text += ", " + std::to_string(arrays->num_slots()) + " slots";
  }
  add_ring<internal::RingCache>(text, cache);
  add_ring<internal::BatchRingCache>(text, cache);
  add_quantization<QuantizedKVCache>(text, cache);
  add_quantization<QuantizedRotatingKVCache>(text, cache);
  add_quantization<BatchQuantizedKVCache>(text, cache);
  add_quantization<BatchQuantizedRotatingKVCache>(text, cache);
  const BatchedCache* batch = batched(cache);
  if (batch == nullptr || (batch->batch_size() == 1 && cache.class_name() == ArraysCache::kClassName)) return text;
  text += ", " + std::to_string(batch->batch_size()) + " rows";
  std::string offsets;
  for (const int offset : cache.positions()) offsets += (offsets.empty() ? "" : ", ") + std::to_string(offset);
  return offsets.empty() ? text : text + ", offsets " + offsets;
}

// A line for the cache and one for each child of a list, indented, under their paths ("3.1").
std::vector<std::pair<std::string, std::string>> cache_lines(const LayerCache& cache, const std::string& path,
                                                             int depth = 1) {
  std::vector<std::pair<std::string, std::string>> lines = {
      {std::string(static_cast<std::size_t>(2 * depth), ' ') + path, cache_text(cache)}};
  if (const auto* list = dynamic_cast<const CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      const auto below = cache_lines(list->child(i), path + "." + std::to_string(i), depth + 1);
      lines.insert(lines.end(), below.begin(), below.end());
    }
  }
  return lines;
}

std::vector<std::string> texts_of(const LayerCache& cache) {
  std::vector<std::string> texts;
  for (auto& [label, text] : cache_lines(cache, "")) texts.push_back(std::move(text));
  return texts;
}

// What the layers' classes alone do not tell; layers that are alike, one after another, share their lines ("0-3").
void add_details(Report& report, const PromptCache& cache) {
  for (std::size_t first = 0, last = 0; first < cache.size(); first = last + 1) {
    const auto texts = texts_of(cache[first]);
    last = first;
    while (last + 1 < cache.size() && texts_of(cache[last + 1]) == texts) ++last;
    if (texts == std::vector{cache[first].class_name()}) continue;
    const auto path = std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
    for (const auto& [label, text] : cache_lines(cache[first], path)) report.add(label, text);
  }
}

// "30 × KVCache, the first 1 x 3 x 17 x 64 float32".
void add_layers(Report& report, const PromptCache& cache) {
  std::vector<std::pair<std::string, int>> runs;
  for (std::size_t i = 0; i < cache.size(); ++i) {
    const auto name = cache[i].class_name();
    if (runs.empty() || runs.back().first != name) runs.emplace_back(name, 0);
    ++runs.back().second;
  }
  std::string text = runs.empty() ? "none" : "";
  for (const auto& [name, count] : runs) text += (text.empty() ? "" : ", ") + std::to_string(count) + " x " + name;
  report.add("layers", text);
  if (cache.size() == 0) return;
  std::vector<mlx::core::array> arrays;
  cache[0].saved_state().collect_arrays(arrays);
  if (!arrays.empty()) report.add("first layer", shape_text(arrays[0]) + " " + dtype_text(arrays[0]));
  add_details(report, cache);
}

void add_tokens(Report& report, const LoadedPromptCache& stored) {
  std::set<int> positions;
  for (std::size_t i = 0; i < stored.cache.size(); ++i) {
    if (const auto position = stored.cache[i].position()) positions.insert(*position);
  }
  if (positions.size() > 1) {
    report.add("tokens", "between " + std::to_string(*positions.begin()) + " and " +
                             std::to_string(*positions.rbegin()) + ": DAMAGED, the layers disagree");
  } else {
    report.add("tokens", std::to_string(positions.empty() ? cache_length(stored.cache) : *positions.begin()));
  }
  const auto& tokens = stored.extension.tokens;
  if (!tokens) {
    report.add("token record", "none");
  } else if (positions.size() == 1 && static_cast<int>(tokens->size()) != *positions.begin()) {
    report.add("token record", std::to_string(tokens->size()) + " ids: DAMAGED, not one for each token");
  } else {
    report.add("token record", std::to_string(tokens->size()) + " ids");
  }
}

// What a chat's save file adds. Foreign or newer members are passed over.
void add_chat(Report& report, const std::string& app_json) {
  const auto app = nlohmann::json::parse(app_json, nullptr, /*allow_exceptions=*/false);
  if (!app.is_object() || !app.contains("chat") || !app["chat"].is_object()) return;
  const auto messages = app["chat"].find("messages");
  if (messages == app["chat"].end() || !messages->is_array()) return;
  report.add("chat", std::to_string(messages->size()) + " messages");
  for (const auto& message : *messages) {
    if (!message.is_object()) continue;
    const auto text = [&](const char* key) {
      const auto found = message.find(key);
      return found != message.end() && found->is_string() ? found->get<std::string>() : std::string();
    };
    report.add("  " + one_line(text("role")).substr(0, 12), excerpt(text("content")));
  }
}

}  // namespace

Report inspect_prompt_cache(const std::filesystem::path& file) {
  const auto stored = load_prompt_cache_file(file.string());
  Report report;
  report.add("prompt cache", file.string());
  report.add("layout", stored.layout == PromptCacheLayout::current ? "current (mlx-lm 0.32 and later)"
                                                                   : "legacy (mlx-lm before 0.32, mlx-swift-lm)");
  report.add("size", format_bytes(std::filesystem::file_size(file)) + "; " +
                         format_bytes(prompt_cache_nbytes(stored.cache)) + " in memory");
  add_tokens(report, stored);
  add_layers(report, stored.cache);
  const auto model = stored.metadata.find("model");
  report.add("model", model == stored.metadata.end() ? "not recorded" : model->second);
  if (const auto& fingerprint = stored.extension.model_fingerprint; !fingerprint.empty()) {
    report.add("fingerprint", fingerprint.substr(0, 16) + "…");
  }
  for (const auto& [key, value] : stored.metadata) {
    if (key != "model") report.add("metadata", key + " = " + excerpt(value));
  }
  if (const auto text = prompt_text_from_json(stored.extension.app_json)) report.add("prompt", excerpt(*text));
  add_chat(report, stored.extension.app_json);
  return report;
}

}  // namespace reprise::app
