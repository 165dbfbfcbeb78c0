// The single caches that a batch class is merged from.
// Threads: free functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::internal {

// Throws: invalid_argument for null or a cache of another class than Source.
template <typename Source>
std::vector<const Source*> merge_sources(const std::string& function, const std::vector<const LayerCache*>& caches) {
  std::vector<const Source*> sources;
  for (const LayerCache* cache : caches) {
    sources.push_back(dynamic_cast<const Source*>(cache));
    if (sources.back() != nullptr) continue;
    throw Error(ErrorCode::invalid_argument, "[" + function + "] each cache must be a " + Source::kClassName +
                                                 ", but got " + (cache ? "a " + cache->class_name() : "null"));
  }
  return sources;
}

// Throws: invalid_argument for no sources or different quantisations.
template <typename Source>
KVQuantization common_quantization(const std::string& function, const std::vector<const Source*>& sources) {
  std::optional<KVQuantization> common;
  for (const Source* source : sources) {
    const KVQuantization own{source->group_size(), source->bits()};
    if (common && *common != own) {
      throw Error(ErrorCode::invalid_argument, "[" + function + "] caches must agree in group size and bits, but got " +
                                                   std::to_string(common->group_size) + " and " +
                                                   std::to_string(common->bits) + ", then " +
                                                   std::to_string(own.group_size) + " and " + std::to_string(own.bits));
    }
    common = own;
  }
  if (common) return *common;
  throw Error(ErrorCode::invalid_argument, "[" + function + "] at least one cache is needed, but got none");
}

}  // namespace reprise::internal
