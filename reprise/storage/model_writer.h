// Writes a model folder as mlx-lm writes it.
// Threads: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "reprise/storage/model_files.h"

namespace reprise {

struct ModelFolderContents {
  std::string config_json;
  WeightMap weights;
  // Where tokenizer, templates and generation settings are copied from: everything small that is neither weights nor
  // config.json.
  std::filesystem::path companions;
};

struct WriteModelOptions {
  std::uint64_t max_shard_bytes = std::uint64_t{5} << 30;
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};  // bytes of weights, after each shard
};

// config.json, model.safetensors (or numbered shards), model.safetensors.index.json and the companions, in a folder
// beside `folder` that takes its place when all is written. Throws: failed_precondition when `folder` exists and is not
// empty, not_found when its parent does not, resource_exhausted, internal; nothing of it is then left.
void write_model_folder(const std::filesystem::path& folder, const ModelFolderContents& contents,
                        const WriteModelOptions& options = {});

}  // namespace reprise
