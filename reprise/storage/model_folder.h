// A model folder as Hugging Face and mlx-lm lay it out. Private to storage.
// Threads: free functions.
#pragma once

#include <filesystem>

#include "reprise/storage/model_files.h"

namespace reprise::internal {

// All of ModelFiles but the fingerprint. Throws: as read_model_files.
ModelFiles read_model_folder(const std::filesystem::path& folder);

}  // namespace reprise::internal
