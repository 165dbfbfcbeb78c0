#include "reprise/hub/listing.h"

#include <fnmatch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "reprise/base/error.h"

namespace reprise::internal {

using Json = nlohmann::json;

namespace {

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[pull] the hub's list of files " + what);
}

bool is_hex(const std::string& text, std::size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// Names become paths below the snapshot's folder.
void check_name(const std::string& name) {
  bool safe = !name.empty() && name.size() < 1000 && name.front() != '/' && name.back() != '/' &&
              name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
  for (std::size_t begin = 0; safe && begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    safe = !part.empty() && part != "." && part != "..";
    begin = end + 1;
  }
  if (!safe) corrupt("has a name that leads out of its folder: '" + name.substr(0, 80) + "'");
}

std::string string_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

HubFile file_of(const Json& sibling) {
  if (!sibling.is_object()) corrupt("has an entry that is no object");
  HubFile file{.name = string_at(sibling, "rfilename")};
  check_name(file.name);
  const Json* described = &sibling;
  file.digest = string_at(sibling, "blobId");
  if (const auto lfs = sibling.find("lfs"); lfs != sibling.end() && lfs->is_object()) {
    described = &*lfs;
    file.digest_kind = BlobDigest::Kind::sha256;
    file.digest = string_at(*lfs, "sha256");
  }
  const auto size = described->find("size");
  const bool has_size = size != described->end() && size->is_number_unsigned();
  if (!has_size || !is_hex(file.digest, file.digest_kind == BlobDigest::Kind::sha256 ? 64 : 40)) {
    corrupt("does not say size and digest of '" + file.name + "'");
  }
  file.size = size->get<std::uint64_t>();
  return file;
}

bool matches(const std::string& name, const std::vector<std::string>& globs) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return fnmatch(glob.c_str(), name.c_str(), 0) == 0; });
}

std::vector<HubFile> matching(const HubListing& listing, const std::vector<std::string>& globs) {
  std::vector<HubFile> files;
  std::copy_if(listing.files.begin(), listing.files.end(), std::back_inserter(files),
               [&](const HubFile& file) { return matches(file.name, globs); });
  return files;
}

}  // namespace

HubListing parse_listing(const std::string& json) {
  const Json document = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) corrupt("is no JSON object");
  HubListing listing{.commit = string_at(document, "sha")};
  if (!is_hex(listing.commit, 40)) corrupt("names no commit");
  const auto siblings = document.find("siblings");
  if (siblings == document.end() || !siblings->is_array()) corrupt("has no member 'siblings'");
  std::set<std::string> names;
  for (const Json& sibling : *siblings) {
    listing.files.push_back(file_of(sibling));
    if (!names.insert(listing.files.back().name).second) corrupt("has '" + listing.files.back().name + "' twice");
  }
  return listing;
}

std::vector<HubFile> select_files(const HubListing& listing, const std::vector<std::string>& globs) {
  if (!globs.empty()) {
    auto files = matching(listing, globs);
    if (files.empty()) throw Error(ErrorCode::not_found, "[pull] no file of the repository matches --include");
    return files;
  }
  const auto weights = matching(listing, {"model*.safetensors"});
  if (!weights.empty()) {
    return matching(listing,
                    {"*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"});
  }
  const auto ggufs = matching(listing, {"*.gguf"});
  if (ggufs.size() == 1) return ggufs;
  if (ggufs.empty()) {
    throw Error(ErrorCode::not_found, "[pull] the repository has neither model*.safetensors nor .gguf files");
  }
  std::string names;
  for (const HubFile& file : ggufs) names += (names.empty() ? "" : ", ") + file.name;
  throw Error(ErrorCode::invalid_argument,
              "[pull] the repository has several .gguf files: choose with --include NAME (" + names + ")");
}

}  // namespace reprise::internal
