// The two layouts of prompt-cache files as pure conversions between layers' states and a safetensors file's content.
// What they mean: docs/prompt_cache_format.md. Nothing here knows a cache class.
// Threads: free functions over values.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/state.h"

namespace reprise::internal {

using Tensors = std::map<std::string, mlx::core::array>;
using TextMap = std::map<std::string, std::string>;

struct LayerRecord {
  std::string class_name;
  State state;
  Meta meta;  // legacy layout only
};

struct FileContent {
  Tensors tensors;
  TextMap metadata;
};

struct ParsedFile {
  PromptCacheLayout layout = PromptCacheLayout::current;
  std::vector<LayerRecord> layers;
  TextMap user_metadata;
  std::string sentinel;  // current layout: "" or a JSON object
  Tensors extra;         // current layout: tensors behind the last layer, which mlx-lm ignores
};

// Metadata key whose text mlx-lm writes as "" and never looks at.
inline constexpr const char* kSentinelKey = "2.0";

// Throws: invalid_argument for an empty key in `user_metadata`.
FileContent encode_current(const std::vector<LayerRecord>& layers, const TextMap& user_metadata);
// Throws: also unsupported for a leaf that is no array, naming its layer.
FileContent encode_legacy(const std::vector<LayerRecord>& layers, const TextMap& user_metadata);

// Tells the layouts apart and reads either. Throws: corrupt_data.
ParsedFile parse_file(const Tensors& tensors, const TextMap& metadata);

// What the two layouts' files share, and parse_file's parts.
ParsedFile parse_current(const Tensors& tensors, const TextMap& metadata);
ParsedFile parse_legacy(const Tensors& tensors, const TextMap& metadata);

// The user's metadata with `prefix` before each key. Throws: invalid_argument for an empty key.
TextMap user_entries(const TextMap& user_metadata, const std::string& prefix);

// Class names from `<prefix>0`, `<prefix>1`, … Throws: corrupt_data when a number is missing or something is no number.
std::vector<std::string> read_class_names(const TextMap& metadata, const std::string& prefix);

}  // namespace reprise::internal
