#include "tests/conformance/cache_classes.h"

#include <stdexcept>

#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"

namespace reprise::conformance {

namespace {

void observe_offset(const LayerCache& cache, Json& out) {
  if (const auto position = cache.position()) out["offset"] = *position;
}

void observe_batch(const LayerCache& cache, Json& out) {
  const auto& batch = dynamic_cast<const internal::BatchGrowingCache&>(cache);
  out["offset"] = batch.positions();
  out["left_padding"] = batch.left_padding();
  out["idx"] = batch.idx();
}

std::vector<CacheClass> make_table() {
  std::vector<CacheClass> table;
  table.push_back({BatchKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<BatchKVCache>(args.at("left_padding").get<std::vector<int>>());
                   },
                   observe_batch});
  table.push_back({BatchQuantizedKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<BatchQuantizedKVCache>(args.at("left_padding").get<std::vector<int>>(),
                                                                    args.value("group_size", 64),
                                                                    args.value("bits", 8));
                   },
                   [](const LayerCache& cache, Json& out) {
                     observe_batch(cache, out);
                     const auto& quantized = dynamic_cast<const BatchQuantizedKVCache&>(cache);
                     out["group_size"] = quantized.group_size();
                     out["bits"] = quantized.bits();
                   }});
  table.push_back({KVCache::kClassName,
                   [](const Json&) -> std::unique_ptr<LayerCache> { return std::make_unique<KVCache>(); },
                   observe_offset});
  table.push_back({QuantizedKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<QuantizedKVCache>(args.value("group_size", 64), args.value("bits", 8));
                   },
                   [](const LayerCache& cache, Json& out) {
                     observe_offset(cache, out);
                     const auto& quantized = dynamic_cast<const QuantizedKVCache&>(cache);
                     out["group_size"] = quantized.group_size();
                     out["bits"] = quantized.bits();
                   }});
  return table;
}

}  // namespace

const CacheClass& cache_class(const std::string& name) {
  static const std::vector<CacheClass> table = make_table();
  for (const CacheClass& entry : table) {
    if (name == entry.name) return entry;
  }
  throw std::runtime_error("not supported: class " + name);
}

std::unique_ptr<LayerCache> make_cache(const Json& spec) {
  return cache_class(spec.at("type").get<std::string>()).make(spec.value("args", Json::object()));
}

Json observe(const LayerCache& cache) {
  Json out = {{"type", cache.class_name()},
              {"is_trimmable", cache.is_trimmable()},
              {"size", cache.size()},
              {"empty", cache.empty()},
              {"nbytes", cache.nbytes()}};
  cache_class(cache.class_name()).observe(cache, out);
  return out;
}

}  // namespace reprise::conformance
