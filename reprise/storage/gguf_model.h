// A GGUF file as a model: Hugging Face's config, names and layouts. Private to storage.
// Threads: free functions.
#pragma once

#include <filesystem>
#include <functional>

#include "reprise/storage/model_files.h"

namespace reprise::internal {

// All of ModelFiles but the fingerprint. Throws: as read_model_files.
ModelFiles read_gguf_model(const std::filesystem::path& file,
                           const std::function<void(const TokenizerData&)>& beside_weights);

}  // namespace reprise::internal
