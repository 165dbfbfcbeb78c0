// Typed look-ups in a GGUF file's metadata. Private to storage.
// Threads: values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reprise/storage/gguf.h"

namespace reprise::internal {

// Each throws corrupt_data when the key is there with another type.
class GgufMetadata {
 public:
  explicit GgufMetadata(const GgufHeader& header) : metadata_(header.metadata) {}

  bool has(const std::string& key) const { return metadata_.contains(key); }
  std::optional<std::string> string(const std::string& key) const;
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  // In [0, 2^31). A list whose items are all the same counts as that item; one whose items differ is unsupported.
  std::optional<int> count(const std::string& key) const;
  // Throws also when the key is missing, or the count is 0.
  int required_count(const std::string& key) const;
  std::vector<std::string> strings(const std::string& key) const;
  std::vector<std::int64_t> integers(const std::string& key) const;
  std::vector<double> numbers(const std::string& key) const;

 private:
  const std::map<std::string, GgufValue>& metadata_;
};

}  // namespace reprise::internal
