#include "tests/conformance/trace.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "reprise/storage/safetensors.h"

namespace reprise::conformance {

const mlx::core::array& Family::array(const std::string& array_name) const {
  const auto found = arrays.find(array_name);
  if (found == arrays.end()) throw std::runtime_error("no array \"" + array_name + "\" in family " + name);
  return found->second;
}

std::vector<std::string> family_names(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) throw std::runtime_error(folder.string() + " is no folder");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json" && entry.path().filename() != "index.json")
      names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Family load_family(const std::filesystem::path& folder, const std::string& name) {
  Family family;
  family.name = name;
  family.folder = folder;
  const std::filesystem::path cases = folder / (name + ".json");
  std::ifstream stream(cases);
  if (!stream) throw std::runtime_error("cannot open " + cases.string());
  const Json json = Json::parse(stream);
  if (!json.is_array()) throw std::runtime_error(cases.string() + " is no list of cases");
  family.cases = json.get<std::vector<Json>>();
  const std::filesystem::path arrays = folder / (name + ".safetensors");
  if (std::filesystem::exists(arrays)) family.arrays = read_safetensors(arrays).tensors;
  return family;
}

}  // namespace reprise::conformance
