// Fetches a model from the Hugging Face hub into the local cache, in huggingface_hub's layout (blobs, snapshots, refs),
// so that Python's tools find it as well.
// Threads: free functions; several threads and processes may pull the same model.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "reprise/hub/repository.h"

namespace reprise {

struct PullProgress {
  std::string file;             // what is being fetched
  std::uint64_t file_done = 0;  // bytes, of earlier attempts too
  std::uint64_t file_size = 0;
  std::uint64_t total_done = 0;  // of all files, those that were there included
  std::uint64_t total_size = 0;
};

struct PullOptions {
  std::filesystem::path cache = hub_cache_folder();
  // Globs on names in the repository; none: configs, tokenizer and safetensors, or the one .gguf file.
  std::vector<std::string> include = {};
  std::function<void(const PullProgress&)> progress = {};  // often: at each piece that comes
  std::function<void(const std::string&)> note = {};       // "the connection was lost, trying again", a sentence each
  std::stop_token stop = {};                               // what has come stays, to go on from
  std::chrono::seconds stall{30};                          // a transfer that brings nothing so long has failed
  int attempts = 6;                                        // in a row without a byte
  std::chrono::milliseconds retry_delay{500};              // doubled at each failure, up to 16 times
  // None: as huggingface_hub finds them, in $HF_ENDPOINT and $HF_TOKEN or the token file.
  std::optional<std::string> endpoint = {};
  std::optional<std::string> token = {};  // empty: none
};

// Returns: the snapshot's folder. What is in the cache is not fetched again; a file that was cut is gone on with; each
// is checked against the hub's digest (SHA-256, or git's) before it is in place; the ref is written last.
// Throws: not_found (no such repository, revision or file; no connection, with what can be done), failed_precondition
// (access is denied: a token is needed; offline), corrupt_data (a digest that stays wrong, a list that is none),
// invalid_argument (several .gguf files and no choice), resource_exhausted (disk full), cancelled.
std::filesystem::path pull(const HubRepository& repository, const PullOptions& options = {});

}  // namespace reprise
