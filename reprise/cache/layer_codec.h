// Live caches as what files hold of them, and back: a record per layer, and per layer or child of a CacheList what the
// record cannot say. A path names one of them: "3", or "3.1" for the second child of layer 3.
// Threads: free functions over values.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "reprise/cache/file_layout.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/nn/keys_values.h"

namespace reprise::internal {

// What the extension keeps of one cache.
struct LayerExtension {
  std::string class_name = {};                      // the cache's own class where the record names another
  std::optional<KVQuantization> quantization = {};  // of that class, when its rows were written dequantised
  ExtraState state = {};

  bool empty() const { return class_name.empty() && !quantization && state.empty(); }
};
using LayerExtensions = std::map<std::string, LayerExtension>;  // by path

// Throws: unsupported, naming the layer, for what has no place in the layout. `portable`: see SaveOptions.
std::vector<LayerRecord> encode_layers(const PromptCache& cache, bool portable, LayerExtensions& extensions);
std::vector<LayerRecord> encode_legacy_layers(const PromptCache& cache, bool portable);

// Throws: corrupt_data or unsupported, naming the layer and what is wrong with it; corrupt_data also for an extension
// of a cache that is not there.
PromptCache decode_layers(const std::vector<LayerRecord>& records, const LayerExtensions& extensions);
PromptCache decode_legacy_layers(const std::vector<LayerRecord>& records);

}  // namespace reprise::internal
