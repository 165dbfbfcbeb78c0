#include "apps/reprise/model_path.h"

#include <cstdlib>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/hub/repository.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A snapshot without a config that holds one .gguf file is that file.
fs::path model_in(const fs::path& snapshot) {
  std::error_code error;
  if (fs::exists(snapshot / "config.json", error)) return snapshot;
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(snapshot, error)) {
    if (entry.path().extension() == ".gguf") files.push_back(entry.path());
  }
  return files.size() == 1 ? files[0] : snapshot;
}

}  // namespace

std::string choose_model(const std::optional<std::string>& flag) {
  if (flag) return *flag;
  for (const char* name : {"REPRISE_MODEL", "REPRISE_FETCHED_MODEL"}) {
    if (auto model = environment(name); !model.empty()) return model;
  }
  throw Error(ErrorCode::not_found,
              "no model was named: use --model MODEL (a folder, a .gguf file or a hub id) or set REPRISE_MODEL");
}

fs::path resolve_model(const std::string& name) {
  std::error_code ignored;
  if (fs::exists(name, ignored)) return name;
  const auto repository = parse_hub_repository(name);
  if (!repository) throw Error(ErrorCode::not_found, "there is no model at " + name + ": no such file or folder");
  const auto cache = hub_cache_folder();
  const auto snapshot = find_snapshot(cache, *repository);
  if (!snapshot) {
    throw Error(ErrorCode::not_found, "there is no model at " + name +
                                          ": no such path, and not in the Hugging Face cache (" + cache.string() +
                                          "); `reprise pull " + name + "` fetches it");
  }
  return model_in(*snapshot);
}

}  // namespace reprise::app
