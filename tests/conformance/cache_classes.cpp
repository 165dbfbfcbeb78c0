#include "tests/conformance/cache_classes.h"

#include <stdexcept>

#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"

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

void observe_batch_ring(const LayerCache& cache, Json& out) {
  const auto& batch = dynamic_cast<const internal::BatchRingCache&>(cache);
  out["offset"] = batch.positions();
  out["left_padding"] = batch.left_padding();
  out["idx"] = batch.idx();
  out["rotated"] = batch.rotated();
  out["max_size"] = batch.max_size();
}

void observe_ring(const LayerCache& cache, Json& out) {
  observe_offset(cache, out);
  const auto& ring = dynamic_cast<const internal::RingCache&>(cache);
  out["max_size"] = ring.max_size();
  out["keep"] = ring.keep();
  out["idx"] = ring.idx();
}

void observe_arrays(const LayerCache& cache, Json& out) {
  const auto& arrays = dynamic_cast<const ArraysCache&>(cache);
  const auto counts = [](const std::optional<std::vector<int>>& values) { return values ? Json(*values) : Json(); };
  out["left_padding"] = counts(arrays.left_padding());
  out["lengths"] = counts(arrays.lengths());
  out["entries"] = Json::array();
  for (int slot = 0; slot < arrays.num_slots(); ++slot) {
    const auto array = arrays.get(slot);
    out["entries"].push_back(array ? Json(std::vector<int>(array->shape().begin(), array->shape().end())) : Json());
  }
}

CacheClass arrays_cache_class() {
  CacheClass entry{ArraysCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     const Json padding = args.value("left_padding", Json());
                     return std::make_unique<ArraysCache>(
                         args.at("size").get<int>(),
                         padding.is_null() ? std::vector<int>{} : padding.get<std::vector<int>>());
                   },
                   observe_arrays};
  entry.make_mask = [](const LayerCache& cache, int N) { return dynamic_cast<const ArraysCache&>(cache).make_mask(N); };
  entry.set = [](LayerCache& cache, int index, const mlx::core::array* value) {
    dynamic_cast<ArraysCache&>(cache).set(index, value ? std::optional(*value) : std::nullopt);
  };
  entry.get = [](const LayerCache& cache, int index) { return dynamic_cast<const ArraysCache&>(cache).get(index); };
  return entry;
}

CacheClass cache_list_class() {
  CacheClass entry{CacheList::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     CacheList::Children children;
                     for (const Json& child : args.at("caches")) children.push_back(make_cache(child));
                     return std::make_unique<CacheList>(std::move(children));
                   },
                   [](const LayerCache& cache, Json& out) {
                     const auto& list = dynamic_cast<const CacheList&>(cache);
                     out["children"] = Json::array();
                     for (std::size_t i = 0; i < list.num_children(); ++i) {
                       out["children"].push_back(observe(list.child(i)));
                     }
                   }};
  entry.child = [](LayerCache& cache, std::size_t index) -> LayerCache& {
    return dynamic_cast<CacheList&>(cache).child(index);
  };
  return entry;
}

std::vector<CacheClass> make_table() {
  std::vector<CacheClass> table;
  table.push_back(arrays_cache_class());
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
  table.push_back({BatchQuantizedRotatingKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<BatchQuantizedRotatingKVCache>(
                         args.at("max_size").get<int>(), args.at("left_padding").get<std::vector<int>>(),
                         args.value("keep", 0), args.value("group_size", 64), args.value("bits", 8));
                   },
                   observe_batch_ring});
  table.push_back({BatchRotatingKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<BatchRotatingKVCache>(args.at("max_size").get<int>(),
                                                                   args.at("left_padding").get<std::vector<int>>(),
                                                                   args.value("keep", 0));
                   },
                   observe_batch_ring});
  table.push_back(cache_list_class());
  table.push_back({ChunkedKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<ChunkedKVCache>(args.at("chunk_size").get<int>());
                   },
                   [](const LayerCache& cache, Json& out) {
                     observe_offset(cache, out);
                     const auto& chunked = dynamic_cast<const ChunkedKVCache&>(cache);
                     out["chunk_size"] = chunked.chunk_size();
                     out["start_position"] = chunked.start_position();
                   },
                   nullptr, nullptr,
                   [](LayerCache& cache) { dynamic_cast<ChunkedKVCache&>(cache).maybe_trim_front(); }});
  table.push_back({ConcatenateKVCache::kClassName,
                   [](const Json&) -> std::unique_ptr<LayerCache> { return std::make_unique<ConcatenateKVCache>(); },
                   observe_offset});
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
  table.push_back({QuantizedRotatingKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<QuantizedRotatingKVCache>(
                         args.at("max_size").get<int>(), args.value("keep", 0), args.value("group_size", 64),
                         args.value("bits", 8));
                   },
                   [](const LayerCache& cache, Json& out) {
                     observe_ring(cache, out);
                     const auto& quantized = dynamic_cast<const QuantizedRotatingKVCache&>(cache);
                     out["group_size"] = quantized.group_size();
                     out["bits"] = quantized.bits();
                   }});
  table.push_back({RotatingKVCache::kClassName,
                   [](const Json& args) -> std::unique_ptr<LayerCache> {
                     return std::make_unique<RotatingKVCache>(args.at("max_size").get<int>(), args.value("keep", 0));
                   },
                   observe_ring});
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
