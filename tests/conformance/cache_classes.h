// What the traces may do with a cache, class by class: one table. A new cache class adds its line.
// Threads: one replay belongs to one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "reprise/cache/layer_cache.h"

namespace reprise::conformance {

using Json = nlohmann::json;

// Null where the class has no such operation.
struct CacheClass {
  const char* name;
  std::unique_ptr<LayerCache> (*make)(const Json& args);
  // Adds the class's own scalars (offset, idx, left_padding, …) to those that every cache answers.
  void (*observe)(const LayerCache& cache, Json& out);

  LayerCache& (*child)(LayerCache& cache, std::size_t index) = nullptr;
  Mask (*make_mask)(const LayerCache& cache, int N) = nullptr;  // where it is not AttentionCache's
  void (*maybe_trim_front)(LayerCache& cache) = nullptr;
  void (*set)(LayerCache& cache, int index, const mlx::core::array* value) = nullptr;
  std::optional<mlx::core::array> (*get)(const LayerCache& cache, int index) = nullptr;
};

// Throws: std::runtime_error for a class that is not built.
const CacheClass& cache_class(const std::string& name);

// A cache from a trace's {"type", "args"}. Throws: as cache_class.
std::unique_ptr<LayerCache> make_cache(const Json& spec);

// The scalars that a trace's `after` may prescribe.
Json observe(const LayerCache& cache);

}  // namespace reprise::conformance
