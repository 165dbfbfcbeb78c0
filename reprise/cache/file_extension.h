// What Reprise adds to a prompt-cache file of the current layout where mlx-lm does not look: a JSON object in the
// sentinel, and tensors behind the last layer. And the digest over all of a file.
// Threads: free functions over values.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "reprise/cache/file_layout.h"
#include "reprise/cache/layer_codec.h"
#include "reprise/storage/safetensors.h"

namespace reprise::internal {

struct FileExtension {
  PromptCacheExtension callers;
  LayerExtensions layers;
};

// What a digest is before it is known.
inline constexpr std::size_t kDigestDigits = 64;
inline constexpr const char* kNoDigest = "0000000000000000000000000000000000000000000000000000000000000000";

// Adds the sentinel's JSON, its digest still 64 zeros, and the tensors to `content`.
// Throws: invalid_argument when `app_json` is no JSON object or a text is not UTF-8.
void add_extension(const FileExtension& extension, std::size_t num_layers, FileContent& content);

// Throws: corrupt_data (a member of a wrong type, a missing tensor), unsupported (a later version).
FileExtension read_extension(const ParsedFile& file);

// The digest that a sentinel states. Throws: corrupt_data when it must state one and does not.
std::optional<std::string> stated_digest(const std::string& sentinel);

// Puts the digest in the place of the zeros that add_extension left.
void fill_digest(TextMap& metadata, const std::string& digest);

}  // namespace reprise::internal
