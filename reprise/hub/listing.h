// What a repository holds at a revision, and which of it a model needs. Private to `hub`.
// Threads: free functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reprise/hub/blob_digest.h"

namespace reprise::internal {

struct HubFile {
  std::string name;  // within the repository: "config.json", "sub/model.safetensors"
  std::uint64_t size = 0;
  BlobDigest::Kind digest_kind = BlobDigest::Kind::git_blob;
  std::string digest = {};  // hex; the blob's name in the cache
};

struct HubListing {
  std::string commit;
  std::vector<HubFile> files = {};
};

// The hub's answer to /api/models/ID/revision/REV?blobs=true. Throws: corrupt_data when it is not one, or a name leads
// out of its folder.
HubListing parse_listing(const std::string& json);

// Those whose names match one of the globs (`*` also matches slashes). Without globs, what mlx-lm takes: configs,
// tokenizer and templates, safetensors; where there are none, the one .gguf file.
// Throws: not_found when nothing matches, invalid_argument when several .gguf files are there and no glob chooses.
std::vector<HubFile> select_files(const HubListing& listing, const std::vector<std::string>& globs);

}  // namespace reprise::internal
