// Names of model repositories on the Hugging Face hub, and where the local cache keeps them: the layout of
// huggingface_hub, so that all tools share what one of them has fetched.
// Threads: free functions; they read the environment.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace reprise {

struct HubRepository {
  std::string organisation;
  std::string name;
  std::string revision = "main";  // a branch, a tag or a commit

  std::string id() const { return organisation + "/" + name; }
  bool operator==(const HubRepository&) const = default;
};

// ORG/NAME or ORG/NAME@REVISION, in the characters that the hub allows; none for another text.
std::optional<HubRepository> parse_hub_repository(const std::string& text);

// $HF_HUB_CACHE, else $HUGGINGFACE_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub,
// ~/.cache/huggingface/hub.
std::filesystem::path hub_cache_folder();

// `cache`/models--ORG--NAME.
std::filesystem::path repository_folder(const std::filesystem::path& cache, const HubRepository& repository);

// The snapshot that the revision names; for "main" without a ref the only one there is. None: not fetched.
std::optional<std::filesystem::path> find_snapshot(const std::filesystem::path& cache, const HubRepository& repository);

}  // namespace reprise
