#include "reprise/hub/repository.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <vector>

#include "reprise/hub/environment.h"

namespace reprise {

namespace fs = std::filesystem;

namespace {

bool is_name(const std::string& text) {
  return !text.empty() && text.size() <= 96 && text[0] != '.' && text[0] != '-' &&
         text.find("..") == std::string::npos && text.find("--") == std::string::npos &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_' || c == '.'; });
}

// Branches may hold slashes ("refs/pr/1"); nothing may lead out of a folder.
bool is_revision(const std::string& text) {
  const bool characters = std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == '/';
  });
  return !text.empty() && text.size() <= 255 && characters && text[0] != '/' && text.back() != '/' && text[0] != '.' &&
         text.find("..") == std::string::npos && text.find("//") == std::string::npos;
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

}  // namespace

std::optional<HubRepository> parse_hub_repository(const std::string& text) {
  const auto at = text.find('@');
  const std::string id = text.substr(0, at);
  const auto slash = id.find('/');
  if (slash == std::string::npos) return {};
  HubRepository repository{id.substr(0, slash), id.substr(slash + 1)};
  if (at != std::string::npos) repository.revision = text.substr(at + 1);
  if (!is_name(repository.organisation) || !is_name(repository.name) || !is_revision(repository.revision)) return {};
  return repository;
}

fs::path hub_cache_folder() {
  using internal::environment;
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const auto folder = environment(name); !folder.empty()) return folder;
  }
  return internal::hugging_face_home() / "hub";
}

fs::path repository_folder(const fs::path& cache, const HubRepository& repository) {
  return cache / ("models--" + repository.organisation + "--" + repository.name);
}

std::optional<fs::path> find_snapshot(const fs::path& cache, const HubRepository& repository) {
  const fs::path folder = repository_folder(cache, repository);
  const fs::path snapshots = folder / "snapshots";
  if (is_folder(snapshots / repository.revision)) return snapshots / repository.revision;
  std::string commit;
  std::ifstream(folder / "refs" / repository.revision) >> commit;
  if (!commit.empty() && commit.find('/') == std::string::npos && is_folder(snapshots / commit)) {
    return snapshots / commit;
  }
  if (repository.revision != "main") return {};
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(snapshots, error)) found.push_back(entry.path());
  if (found.size() == 1) return found[0];
  return {};
}

}  // namespace reprise
