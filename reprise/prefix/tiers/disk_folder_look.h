// What a disk tier's folder may hold, and whether a folder that is there is one. Only looks. Private to tiers.
// Threads: free functions.
#pragma once

#include <filesystem>
#include <string_view>

namespace reprise::internal {

inline constexpr const char* kIndexName = "index.sqlite";
inline constexpr const char* kOpeningLockName = "opening.lock";
inline constexpr const char* kUsersLockName = "users.lock";
inline constexpr const char* kFilesName = "files";
inline constexpr const char* kFileSuffix = ".safetensors";
// What opening.lock holds. It is written before anything else is made, so that no other folder is taken for one of
// ours, and one that was left half made is.
inline constexpr std::string_view kMark = "reprise disk tier\n";

// Of names in kFilesName: those of content, and those that replace_file gives them while they are written.
bool is_content_name(std::string_view name);
bool is_unfinished_name(std::string_view name);

struct FolderLook {
  // It is a disk tier's, and others could write it, or something in it: what it says may be theirs.
  bool is_exposed = false;
};
// Throws: invalid_argument unless the folder is empty or a disk tier's with nothing else in it, no links, and nothing
// that belongs neither to this user nor to the folder's; internal
// when it cannot be read. The text names what is in the way.
FolderLook look_at(const std::filesystem::path& folder);

}  // namespace reprise::internal
