// What `reprise inspect` finds out, as lines of a label and a text. One function for each kind of file.
// Threads: free functions. None of them loads a model's weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace reprise::app {

class Report {
 public:
  void add(std::string label, std::string text) { lines_.emplace_back(std::move(label), std::move(text)); }
  // The lines, labels padded to one width.
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

// All throw Error (corrupt_data, not_found, unsupported) for what is damaged or missing, naming it.
Report inspect_model_folder(const std::filesystem::path& folder);
Report inspect_gguf(const std::filesystem::path& file);
Report inspect_prompt_cache(const std::filesystem::path& file);
// A safetensors file that is no prompt cache.
Report inspect_safetensors(const std::filesystem::path& file);

// Waiting for a pipe or reading a device without end is no way to look at a file.
// Throws: Error (invalid_argument) for what is no regular file, not_found.
void require_regular(const std::filesystem::path& file);

// "84.9 MB", "512 bytes".
std::string format_bytes(std::uint64_t bytes);
// "134.5 million", "12 345".
std::string format_count(std::uint64_t count);
// The first characters, on one line, in quotes.
std::string excerpt(const std::string& text);

}  // namespace reprise::app
