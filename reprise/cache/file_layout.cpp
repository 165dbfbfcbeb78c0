#include "reprise/cache/file_layout.h"

#include <optional>
#include <string_view>

#include "reprise/base/error.h"
#include "reprise/cache/path_tree.h"

namespace reprise::internal {

ParsedFile parse_file(const Tensors& tensors, const TextMap& metadata) {
  const auto sentinel = metadata.find(kSentinelKey);
  if (sentinel == metadata.end()) {
    throw Error(ErrorCode::corrupt_data,
                "[load_prompt_cache] a prompt cache has metadata \"2.0\", but got a file without it");
  }
  const bool is_current = sentinel->second.empty() || sentinel->second.front() == '{';
  return is_current ? parse_current(tensors, metadata) : parse_legacy(tensors, metadata);
}

std::vector<std::string> read_class_names(const TextMap& metadata, const std::string& prefix) {
  std::map<std::size_t, std::string> names;
  for (auto entry = metadata.lower_bound(prefix); entry != metadata.end() && entry->first.starts_with(prefix);
       ++entry) {
    const auto layer = parse_index(std::string_view(entry->first).substr(prefix.size()));
    if (!layer) fail_path(entry->first, "a class name must be at a layer's index");
    names.emplace(*layer, entry->second);
  }
  std::vector<std::string> result;
  for (auto& [layer, name] : names) {
    if (layer != result.size()) {
      fail_path(prefix + std::to_string(result.size()), "every layer must have a class name, but this is missing");
    }
    result.push_back(std::move(name));
  }
  return result;
}

TextMap user_entries(const TextMap& user_metadata, const std::string& prefix) {
  TextMap entries;
  for (const auto& [key, value] : user_metadata) {
    if (key.empty()) {
      throw Error(ErrorCode::invalid_argument, "[save_prompt_cache] a metadata key must not be empty, but got \"\"");
    }
    entries.emplace(prefix + key, value);
  }
  return entries;
}

}  // namespace reprise::internal
