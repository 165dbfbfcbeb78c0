#include "reprise/cache/registry.h"

#include <algorithm>
#include <iterator>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
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

namespace reprise {

namespace {

struct CacheClass {
  const char* name;  // stored on disk: never rename
  std::unique_ptr<LayerCache> (*from_state)(const State& state);
  std::unique_ptr<LayerCache> (*from_legacy)(const State& state, const Meta& meta);
};

template <typename Cache>
constexpr CacheClass cache_class(const char* name = Cache::kClassName) {
  return {name, [](const State& state) -> std::unique_ptr<LayerCache> { return Cache::from_state(state); },
          [](const State& state, const Meta& meta) -> std::unique_ptr<LayerCache> {
            return Cache::from_legacy(state, meta);
          }};
}

// A new class adds its line here.
// clang-format off
constexpr CacheClass kCacheClasses[] = {
    cache_class<ArraysCache>(),
    cache_class<BatchChunkedKVCache>(),
    cache_class<BatchKVCache>(),
    cache_class<BatchQuantizedKVCache>(),
    cache_class<BatchQuantizedRotatingKVCache>(),
    cache_class<BatchRotatingKVCache>(),
    cache_class<CacheList>(),
    cache_class<ChunkedKVCache>(),
    cache_class<ConcatenateKVCache>(),
    cache_class<KVCache>(),
    cache_class<MambaCache>("MambaCache"),
    cache_class<QuantizedKVCache>(),
    cache_class<QuantizedRotatingKVCache>(),
    cache_class<RotatingKVCache>(),
};
// clang-format on

const CacheClass* find_class(const std::string& name) {
  const auto found = std::find_if(std::begin(kCacheClasses), std::end(kCacheClasses),
                                  [&](const CacheClass& known) { return name == known.name; });
  return found == std::end(kCacheClasses) ? nullptr : found;
}

const CacheClass& known_class(const char* function, const std::string& name) {
  if (const CacheClass* found = find_class(name)) return *found;
  throw Error(ErrorCode::unsupported, std::string("[") + function +
                                          "] the cache class must be one that this build knows, " + "but got \"" +
                                          name + "\"");
}

}  // namespace

std::unique_ptr<LayerCache> cache_from_state(const std::string& class_name, const State& state) {
  return known_class("cache_from_state", class_name).from_state(state);
}

std::unique_ptr<LayerCache> cache_from_legacy(const std::string& class_name, const State& state, const Meta& meta) {
  return known_class("cache_from_legacy", class_name).from_legacy(state, meta);
}

bool is_known_cache_class(const std::string& class_name) { return find_class(class_name) != nullptr; }

std::vector<std::string> known_cache_classes() {
  std::vector<std::string> names;
  for (const CacheClass& known : kCacheClasses) names.emplace_back(known.name);
  return names;
}

}  // namespace reprise
