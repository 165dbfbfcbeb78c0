// Prompt caches on disk, in mlx-lm's layouts: written as 0.32 does (or as ≤ 0.31 on demand), all generations read.
// Byte layout: docs/prompt_cache_format.md.
// Threads: free functions. A loaded cache is evaluated: it may go to any thread, and the file may vanish.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "reprise/base/tokens.h"
#include "reprise/cache/prompt_cache.h"

namespace reprise {

enum class PromptCacheLayout {
  current,  // mlx-lm ≥ 0.32
  legacy,   // mlx-lm ≤ 0.31, mlx-swift-lm
};

// What Reprise adds where mlx-lm does not look; all of it optional.
struct PromptCacheExtension {
  std::optional<Tokens> tokens = {};  // ids of the rows stored
  std::string model_fingerprint = {};
  // JSON object of the caller's own members (a chat's transcript), kept verbatim under "app"; empty for none.
  std::string app_json = {};
};

class FileSystem;

struct SaveOptions {
  PromptCacheLayout layout = PromptCacheLayout::current;
  PromptCacheExtension extension = {};  // current layout only
  // Quantised classes that mlx-lm does not have are written dequantised, as the nearest class that it has. Loading the
  // current layout gives the quantised class back, its numbers within one step of quantisation; loading the legacy one
  // gives that class of mlx-lm.
  bool portable = false;
  bool verify = true;                 // re-read the temporary file before it takes the target's name
  FileSystem* file_system = nullptr;  // null: the real one
};

// Writes atomically: any failure leaves an old file untouched and no temporary behind. Appends `.safetensors` to a name
// without it. The same cache and options give the same bytes.
// Returns: the path written.
// Throws: invalid_argument (empty metadata key), unsupported (what the layout cannot hold, named), failed_precondition
// (layers out of step), and what replace_file throws.
std::string save_prompt_cache(const std::string& file, const PromptCache& cache,
                              const std::map<std::string, std::string>& metadata = {}, const SaveOptions& options = {});

struct LoadedPromptCache {
  PromptCache cache;
  std::map<std::string, std::string> metadata;  // the user's
  PromptCacheExtension extension;
  PromptCacheLayout layout = PromptCacheLayout::current;
};

// All or nothing: everything is read, checked and evaluated before it returns.
// Throws: invalid_argument (name without `.safetensors`), not_found, corrupt_data (not a prompt cache; digest mismatch;
// which layer and item is wrong), unsupported (a class this build does not know, named).
LoadedPromptCache load_prompt_cache_file(const std::string& file);

// mlx-lm's form of it.
PromptCache load_prompt_cache(const std::string& file, std::map<std::string, std::string>* metadata = nullptr);

}  // namespace reprise
