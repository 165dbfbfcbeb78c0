// Which model a command works on, and where it lies.
// Threads: free functions; they read the environment.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace reprise::app {

// `flag`, else $REPRISE_MODEL, else $REPRISE_FETCHED_MODEL (what ./run has fetched).
// Throws: Error (not_found), naming the ways to say it.
std::string choose_model(const std::optional<std::string>& flag);

// A path as it is; a hub id (ORG/NAME[@REV]) becomes its folder, or one .gguf file, in the local Hugging Face cache.
// Throws: Error (not_found), saying how to get it.
std::filesystem::path resolve_model(const std::string& name);

}  // namespace reprise::app
