// A folder of conformance traces in memory: families of cases, and the arrays that they name.
// Threads: values.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "nlohmann/json.hpp"

namespace reprise::conformance {

using Json = nlohmann::json;

struct Family {
  std::string name;
  std::filesystem::path folder;
  std::vector<Json> cases;
  std::map<std::string, mlx::core::array> arrays;

  // Throws: std::runtime_error when there is no such array.
  const mlx::core::array& array(const std::string& array_name) const;
};

// Names of the families in `folder`, sorted. Throws: std::runtime_error when it is no folder.
std::vector<std::string> family_names(const std::filesystem::path& folder);

// Throws: std::runtime_error or reprise::Error for what cannot be read.
Family load_family(const std::filesystem::path& folder, const std::string& name);

}  // namespace reprise::conformance
