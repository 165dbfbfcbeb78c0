#include "apps/reprise/model_path.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "reprise/base/error.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// As huggingface_hub looks for it.
fs::path hub_cache() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const auto folder = environment(name); !folder.empty()) return folder;
  }
  if (const auto home = environment("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  if (const auto cache = environment("XDG_CACHE_HOME"); !cache.empty()) return fs::path(cache) / "huggingface" / "hub";
  return fs::path(environment("HOME")) / ".cache" / "huggingface" / "hub";
}

// ORG/NAME, in the characters that the hub allows.
bool is_hub_id(const std::string& name) {
  const auto slash = name.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == name.size()) return false;
  if (name.find('/', slash + 1) != std::string::npos || name[0] == '.' || name[slash + 1] == '.') return false;
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '/' || c == '-' || c == '_' || c == '.'; });
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

// The snapshot that refs/main names, else the only one there is.
std::optional<fs::path> find_snapshot(const fs::path& repository) {
  std::string revision;
  std::ifstream(repository / "refs" / "main") >> revision;
  const auto snapshots = repository / "snapshots";
  if (!revision.empty() && revision.find('/') == std::string::npos && is_folder(snapshots / revision)) {
    return snapshots / revision;
  }
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(snapshots, error)) found.push_back(entry.path());
  if (found.size() == 1) return found[0];
  return std::nullopt;
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
  if (!is_hub_id(name)) throw Error(ErrorCode::not_found, "there is no model at " + name + ": no such file or folder");
  const auto slash = name.find('/');
  const auto cache = hub_cache();
  const auto snapshot = find_snapshot(cache / ("models--" + name.substr(0, slash) + "--" + name.substr(slash + 1)));
  if (snapshot) return *snapshot;
  throw Error(ErrorCode::not_found, "there is no model at " + name +
                                        ": no such path, and not in the Hugging Face cache (" + cache.string() +
                                        "); `hf download " + name + "` fetches it");
}

}  // namespace reprise::app
